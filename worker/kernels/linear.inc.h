/* Linear layers: output = input * weights^T + bias, from the weights as torch keeps them. There is no packed copy.
 *
 * M rows, N outputs, K inputs. A tile is TILE_ROWS rows times TILE_COLUMNS outputs. Its dot products are summed lane by
 * lane over SPAN_INPUTS inputs, then over the lanes, then over the spans. This order is the same in every tile, so the
 * result of a row has the same bits whatever the other rows are, and however many.
 */

enum {
    TILE_ROWS = LANES == 16 ? 4 : 3,
    TILE_COLUMNS = LANES == 16 ? 6 : 4,
    TILE_SUMS = (TILE_ROWS * TILE_COLUMNS + LANES - 1) / LANES * LANES,
    SPAN_INPUTS = 768,         /* so that a tile's weights stay in the first-level cache */
    BLOCK_INPUTS = 128 * 1024, /* entries of the rows that pass a tile of weights: they stay in the second-level cache */
    LARGEST_BLOCK = 64 * TILE_ROWS, /* rows */
    SMALL_WORK = 64 * 1024,         /* multiplications that are not worth a second thread */
};

/* Add the dot products of a tile to sums [TILE_SUMS], row by row. `size` is a multiple of LANES. */
static inline __attribute__((always_inline)) void add_products(const float *input, int64_t input_stride,
                                                               const float *weights, int64_t weight_stride, int64_t size,
                                                               const int rows, const int prefetches, float *sums)
{
    vf products[TILE_SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < TILE_SUMS; i++)
        products[i] = (vf){0};
    for (int64_t k = 0; k < size; k += LANES) {
        vf parts[TILE_ROWS];
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
            parts[row] = load(input + row * input_stride + k);
#pragma GCC unroll 8
        for (int column = 0; column < TILE_COLUMNS; column++) {
            vf weight = load(weights + column * weight_stride + k);
            if (prefetches) /* the next tile's weights, into the second-level cache */
                __builtin_prefetch(weights + (column + TILE_COLUMNS) * weight_stride + k, 0, 2);
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++)
                products[row * TILE_COLUMNS + column] += parts[row] * weight;
        }
    }
#pragma GCC unroll 8
    for (int first = 0; first < rows * TILE_COLUMNS; first += LANES)
        store(sums + first, load(sums + first) + sums_of_lanes(products + first));
}

/* The compiler makes a version of add_products for each number of rows. Not inline: with the callers' variables GCC runs
 * out of registers. */
static __attribute__((noinline)) void add_tile(const float *input, int64_t input_stride, const float *weights,
                                               int64_t weight_stride, int64_t size, int64_t rows, int is_first,
                                               float *sums)
{
    if (rows >= TILE_ROWS && !is_first)
        add_products(input, input_stride, weights, weight_stride, size, TILE_ROWS, 0, sums);
    else if (rows >= TILE_ROWS)
        add_products(input, input_stride, weights, weight_stride, size, TILE_ROWS, 1, sums);
    else if (rows == 3)
        add_products(input, input_stride, weights, weight_stride, size, 3, 1, sums);
    else if (rows == 2)
        add_products(input, input_stride, weights, weight_stride, size, 2, 1, sums);
    else
        add_products(input, input_stride, weights, weight_stride, size, 1, 1, sums);
}

static void write_outputs(const struct linear *c, const float *sums, int64_t row, int64_t first_column, int columns)
{
    int64_t to = row * c->num_outputs + first_column;
    const float *bias = c->bias ? (const float *)c->bias + first_column : NULL;
    const uint16_t *bias_bf16 = c->bias ? (const uint16_t *)c->bias + first_column : NULL;
    if (c->dtype == FLOAT32)
        for (int column = 0; column < columns; column++)
            ((float *)c->output)[to + column] = bias ? sums[column] + bias[column] : sums[column];
    else
        for (int column = 0; column < columns; column++)
            ((uint16_t *)c->output)[to + column] =
                to_bf16(bias_bf16 ? sums[column] + from_bf16(bias_bf16[column]) : sums[column]);
}

/* Compute some rows of a tile's columns. `input` is float32, padded with zeros to a multiple of LANES. */
static void linear_columns(const struct linear *c, const float *input, int64_t input_stride, int64_t first_row,
                           int64_t num_rows, int64_t first_column, float *sums, float *widened)
{
    int columns = smaller(TILE_COLUMNS, c->num_outputs - first_column);
    int is_direct = c->dtype == FLOAT32 && c->num_inputs % LANES == 0 && columns == TILE_COLUMNS;
    memset(sums, 0, (num_rows + TILE_ROWS - 1) / TILE_ROWS * TILE_SUMS * sizeof(float));
    for (int64_t k = 0; k < c->num_inputs; k += SPAN_INPUTS) {
        int64_t size = smaller(SPAN_INPUTS, c->num_inputs - k);
        const float *weights = (const float *)c->weights + first_column * c->num_inputs + k;
        int64_t stride = c->num_inputs;
        if (!is_direct) {
            weights = widened;
            stride = padded(size);
            memset(widened, 0, TILE_COLUMNS * stride * sizeof(float));
            for (int column = 0; column < columns; column++)
                widen(widened + column * stride, c->weights, (first_column + column) * c->num_inputs + k, size, c->dtype,
                      1.0f);
        }
        for (int64_t row = 0; row < num_rows; row += TILE_ROWS)
            add_tile(input + (first_row + row) * input_stride + k, input_stride, weights, stride, padded(size),
                     num_rows - row, row == 0, sums + row / TILE_ROWS * TILE_SUMS);
    }
    for (int64_t row = 0; row < num_rows; row++)
        write_outputs(c, sums + row / TILE_ROWS * TILE_SUMS + row % TILE_ROWS * TILE_COLUMNS, first_row + row,
                      first_column, columns);
}

static int linear(const struct linear *c)
{
    const float *input = c->input;
    int64_t input_stride = padded(c->num_inputs);
    float *copy = NULL;
    if (c->dtype != FLOAT32 || input_stride != c->num_inputs) {
        if (!(copy = malloc(c->num_rows * input_stride * sizeof(float) + 1)))
            return -1;
        for (int64_t row = 0; row < c->num_rows; row++)
            widen(copy + row * input_stride, c->input, row * c->num_inputs, c->num_inputs, c->dtype, 1.0f);
        input = copy;
    }
    int64_t block = BLOCK_INPUTS / input_stride / TILE_ROWS * TILE_ROWS;
    block = smaller(block > 4 * TILE_ROWS ? block : 4 * TILE_ROWS, LARGEST_BLOCK);
    int64_t tiles = (c->num_outputs + TILE_COLUMNS - 1) / TILE_COLUMNS;
    int64_t units = (c->num_rows + block - 1) / block * tiles;
    int is_small = c->num_rows * c->num_outputs * c->num_inputs < SMALL_WORK;
#pragma omp parallel num_threads(is_small ? 1 : c->num_threads)
    {
        float sums[LARGEST_BLOCK / TILE_ROWS * TILE_SUMS], widened[TILE_COLUMNS * SPAN_INPUTS];
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < units; unit++) {
            int64_t row = unit / tiles * block;
            linear_columns(c, input, input_stride, row, smaller(block, c->num_rows - row), unit % tiles * TILE_COLUMNS,
                           sums, widened);
        }
    }
    free(copy);
    return 0;
}
