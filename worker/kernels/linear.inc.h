/* Linear layers: output = input * weights^T + bias, from packed weights.
 *
 * M rows, N outputs, K inputs. The weights are packed in panels of PANEL_OUTPUTS outputs. A panel has one line for each
 * input (float32), or for each pair of inputs (bfloat16):
 *
 *     float32   [N / PANEL_OUTPUTS, K, PANEL_OUTPUTS]
 *     bfloat16  [N / PANEL_OUTPUTS, K / 2, PANEL_OUTPUTS, 2]
 *
 * N is padded to whole panels, and K to whole pairs, with zeros. A tile is up to TILE_ROWS rows times a panel. Each of its
 * sums adds the products of SPAN_INPUTS inputs one after the other, and then the spans. This order is the same in every
 * tile, so the result of a row has the same bits whatever the other rows are, and however many.
 */

enum {
    PANEL_VECTORS = LANES == 16 ? 3 : 2,
    PANEL_OUTPUTS = PANEL_VECTORS * LANES,
    TILE_ROWS = LANES == 16 ? 8 : 6,
    SPAN_INPUTS = 384,         /* even. Sums of more would lose digits, and a span of a panel stays in the cache */
    BLOCK_INPUTS = 128 * 1024, /* entries of the rows that pass a panel: they stay in the second-level cache */
    BLOCK_ROWS = 32 * TILE_ROWS,
    AHEAD = 1024,           /* floats of the panel that are fetched before their use */
    SMALL_WORK = 64 * 1024, /* multiplications that are not worth a second thread */
};

/* The inputs of a call as the tiles read them: those of the caller, or a copy. */
struct rows {
    const float *first;
    int64_t stride;
};

static inline __attribute__((always_inline)) void multiply(vf products[TILE_ROWS][PANEL_VECTORS],
                                                           const vf weights[PANEL_VECTORS], const float *input,
                                                           int64_t stride, const int num_rows)
{
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; row++) {
        vf part = splat(input[row * stride]);
#pragma GCC unroll 8
        for (int v = 0; v < PANEL_VECTORS; v++)
            products[row][v] += part * weights[v];
    }
}

/* Add the products of one span to sums [num_rows, PANEL_OUTPUTS]. */
static inline __attribute__((always_inline)) void add_span(const float *input, int64_t stride, const void *panel,
                                                           int64_t size, const int is_bf16, const int num_rows,
                                                           float *sums)
{
    vf products[TILE_ROWS][PANEL_VECTORS], weights[PANEL_VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < PANEL_VECTORS; v++)
            products[row][v] = (vf){0};
    const float *line = panel;
    if (is_bf16) {
        for (int64_t k = 0; k < size; k += 2, line += PANEL_OUTPUTS) {
            vi pairs[PANEL_VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < PANEL_VECTORS; v++) {
                pairs[v] = (vi)load(line + v * LANES);
                __builtin_prefetch(line + AHEAD + v * LANES);
                weights[v] = (vf)(pairs[v] << 16);
            }
            multiply(products, weights, input + k, stride, num_rows);
            if (k + 1 == size)
                break;
#pragma GCC unroll 8
            for (int v = 0; v < PANEL_VECTORS; v++)
                weights[v] = (vf)(pairs[v] & (int32_t)0xffff0000);
            multiply(products, weights, input + k + 1, stride, num_rows);
        }
    } else {
        for (int64_t k = 0; k < size; k++, line += PANEL_OUTPUTS) {
#pragma GCC unroll 8
            for (int v = 0; v < PANEL_VECTORS; v++) {
                weights[v] = load(line + v * LANES);
                __builtin_prefetch(line + AHEAD + v * LANES);
            }
            multiply(products, weights, input + k, stride, num_rows);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < PANEL_VECTORS; v++, sums += LANES)
            store(sums, load(sums) + products[row][v]);
}

/* The compiler makes a version of add_span for each number of rows and each type of weights. */
#define ADD_SPAN(num_rows) \
    case num_rows: \
        if (is_bf16) \
            add_span(input, stride, panel, size, 1, num_rows, sums); \
        else \
            add_span(input, stride, panel, size, 0, num_rows, sums); \
        break;

static __attribute__((noinline)) void add_tile(const float *input, int64_t stride, const void *panel, int64_t size,
                                               int is_bf16, int64_t num_rows, float *sums)
{
    switch (num_rows) {
        ADD_SPAN(1)
        ADD_SPAN(2)
        ADD_SPAN(3)
        ADD_SPAN(4)
        ADD_SPAN(5)
        ADD_SPAN(6)
#if LANES == 16
        ADD_SPAN(7)
        ADD_SPAN(8)
#endif
    }
}

/* Compute the outputs of a panel in sums [num_rows, PANEL_OUTPUTS]. */
static void multiply_panel(const struct linear *c, struct rows rows, int64_t first_row, int64_t num_rows, int64_t panel,
                           float *sums)
{
    int is_bf16 = c->weight_dtype == BFLOAT16;
    int64_t lines = is_bf16 ? (c->num_inputs + 1) / 2 : c->num_inputs;
    const float *first_line = (const float *)c->panels + panel * lines * PANEL_OUTPUTS;
    int64_t num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    int64_t num_outputs = smaller(PANEL_OUTPUTS, c->num_outputs - panel * PANEL_OUTPUTS);
    memset(sums, 0, num_rows * PANEL_OUTPUTS * sizeof(float));
    for (int64_t k = 0; k < c->num_inputs; k += SPAN_INPUTS) {
        int64_t size = smaller(SPAN_INPUTS, c->num_inputs - k);
        const float *line = first_line + (is_bf16 ? k / 2 : k) * PANEL_OUTPUTS;
        for (int64_t tile = 0; tile < num_tiles; tile++) { /* of about the same size */
            int64_t row = num_rows * tile / num_tiles, end = num_rows * (tile + 1) / num_tiles;
            add_tile(rows.first + (first_row + row) * rows.stride + k, rows.stride, line, size, is_bf16, end - row,
                     sums + row * PANEL_OUTPUTS);
        }
    }
    for (int64_t row = 0; c->bias && row < num_rows; row++)
        for (int64_t i = 0; i < num_outputs; i++)
            sums[row * PANEL_OUTPUTS + i] += c->bias[panel * PANEL_OUTPUTS + i];
}

static void write_outputs(const struct linear *c, const float *sums, int64_t first_row, int64_t num_rows,
                          int64_t first_output)
{
    int64_t num_outputs = smaller(PANEL_OUTPUTS, c->num_outputs - first_output);
    for (int64_t row = 0; row < num_rows; row++, sums += PANEL_OUTPUTS) {
        int64_t at = (first_row + row) * c->num_outputs + first_output;
        float *output = (float *)c->output + at;
        uint16_t *output_bf16 = (uint16_t *)c->output + at;
        for (int64_t i = 0; i < num_outputs; i++)
            if (c->output_dtype == FLOAT32)
                output[i] = c->accumulates ? output[i] + sums[i] : sums[i];
            else
                output_bf16[i] = to_bf16(c->accumulates ? from_bf16(output_bf16[i]) + sums[i] : sums[i]);
    }
}

/* --- argmax of the outputs, which are not stored --- */

/* What a thread knows of a row: lane by lane the largest output, the first id that has it, and whether one is NaN. */
struct leader {
    vf best;
    vi ids, has_nan;
};

static void compare_outputs(struct leader *leaders, const float *sums, int64_t num_rows, int64_t first_output,
                            int64_t num_outputs)
{
    for (int64_t row = 0; row < num_rows; row++, sums += PANEL_OUTPUTS) {
        struct leader leader = leaders[row];
        vi ids = first_ints() + (int32_t)first_output;
        for (int v = 0; v < PANEL_VECTORS; v++, ids += LANES) {
            vi exists = ids < (int32_t)num_outputs;
            vf x = load(sums + v * LANES);
            vi is_better = (x > leader.best) & exists; /* not >=: of equal outputs the first wins */
            leader.best = pick(is_better, x, leader.best);
            leader.ids = pick_int(is_better, ids, leader.ids);
            leader.has_nan |= (x != x) & exists;
        }
        leaders[row] = leader;
    }
}

/* Find the row's largest output in the threads' parts. */
static void find_leader(const struct leader *leaders, int64_t num_parts, int64_t stride, float *peak, int64_t *token_id)
{
    int is_nan = 0;
    *peak = -INFINITY;
    *token_id = 0;
    for (int64_t part = 0; part < num_parts; part++, leaders += stride) {
        is_nan |= any_lane(leaders->has_nan);
        for (int lane = 0; lane < LANES; lane++)
            if (leaders->best[lane] > *peak || (leaders->best[lane] == *peak && leaders->ids[lane] < *token_id)) {
                *peak = leaders->best[lane];
                *token_id = leaders->ids[lane];
            }
    }
    if (is_nan)
        *peak = NAN;
}

/* --- the calls --- */

/* Make `rows` of the input. If it has to be copied, `copy` is to be freed. Return 0, or -1 if there is no memory.
 * Rows whose distance is a power of 2 would displace each other from the cache. */
static int prepare_rows(const struct linear *c, struct rows *rows, float **copy)
{
    *rows = (struct rows){c->input, c->num_inputs};
    *copy = NULL;
    if (c->input_dtype == FLOAT32 && (c->num_rows <= TILE_ROWS || c->num_inputs % 512 != 0))
        return 0;
    int64_t stride = padded(c->num_inputs) + 16;
    if (!(*copy = malloc(c->num_rows * stride * sizeof(float) + 1)))
        return -1;
    for (int64_t row = 0; row < c->num_rows; row++)
        widen(*copy + row * stride, c->input, row * c->num_inputs, c->num_inputs, c->input_dtype, 1.0f);
    *rows = (struct rows){*copy, stride};
    return 0;
}

static int useful_threads(const struct linear *c)
{
    return c->num_rows * c->num_outputs * c->num_inputs < SMALL_WORK ? 1 : c->num_threads;
}

/* Return how many rows pass a panel at a time. */
static int64_t block_rows(const struct linear *c)
{
    int64_t block = BLOCK_INPUTS / c->num_inputs / TILE_ROWS * TILE_ROWS;
    return smaller(block > 4 * TILE_ROWS ? block : 4 * TILE_ROWS, BLOCK_ROWS);
}

static int64_t num_panels(const struct linear *c)
{
    return (c->num_outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
}

static int linear(const struct linear *c)
{
    struct rows rows;
    float *copy;
    if (prepare_rows(c, &rows, &copy) != 0)
        return -1;
    int64_t block = block_rows(c), panels = num_panels(c), units = (c->num_rows + block - 1) / block * panels;
#pragma omp parallel num_threads(useful_threads(c))
    {
        float sums[BLOCK_ROWS * PANEL_OUTPUTS];
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < units; unit++) {
            int64_t first = unit / panels * block;
            multiply_panel(c, rows, first, smaller(block, c->num_rows - first), unit % panels, sums);
            write_outputs(c, sums, first, smaller(block, c->num_rows - first), unit % panels * PANEL_OUTPUTS);
        }
    }
    free(copy);
    return 0;
}

static int linear_argmax(const struct linear *c)
{
    struct rows rows;
    float *copy;
    int num_threads = useful_threads(c);
    struct leader *leaders = aligned_alloc(sizeof(vf), (num_threads * c->num_rows + 1) * sizeof(struct leader));
    if (!leaders || prepare_rows(c, &rows, &copy) != 0) {
        free(leaders);
        return -1;
    }
    for (int64_t i = 0; i < num_threads * c->num_rows; i++)
        leaders[i] = (struct leader){splat(-INFINITY), (vi){0}, (vi){0}};
    int64_t block = block_rows(c), panels = num_panels(c);
#pragma omp parallel num_threads(num_threads)
    {
        float sums[BLOCK_ROWS * PANEL_OUTPUTS];
        struct leader *own = leaders + omp_get_thread_num() * c->num_rows;
        for (int64_t first = 0; first < c->num_rows; first += block) {
            int64_t count = smaller(block, c->num_rows - first);
#pragma omp for schedule(static) nowait
            for (int64_t panel = 0; panel < panels; panel++) {
                multiply_panel(c, rows, first, count, panel, sums);
                compare_outputs(own + first, sums, count, panel * PANEL_OUTPUTS, c->num_outputs);
            }
        }
    }
    for (int64_t row = 0; row < c->num_rows; row++)
        find_leader(leaders + row, num_threads, c->num_rows, c->peaks + row, c->token_ids + row);
    free(copy);
    free(leaders);
    return 0;
}
