/* Linear layers: output = input * weights^T + bias, from packed weights.
 *
 * M rows, N outputs, K inputs. The weights are packed in panels of PANEL_OUTPUTS outputs. A panel has one line for each
 * input (float32), for each pair of inputs (bfloat16) or for four (int8):
 *
 *     float32   [N / PANEL_OUTPUTS, K, PANEL_OUTPUTS]
 *     bfloat16  [N / PANEL_OUTPUTS, K / 2, PANEL_OUTPUTS, 2]
 *     int8      [N / PANEL_OUTPUTS, K / 4, PANEL_OUTPUTS, 4]
 *
 * N is padded to whole panels, and K to whole pairs or to 64 bytes, with zeros. A tile is up to TILE_ROWS rows times a panel.
 * Each of its sums adds the products of SPAN_INPUTS inputs one after the other, and then the spans. This order is the same in
 * every tile, so the result of a row has the same bits whatever the other rows are, and however many.
 *
 * With int8 weights, the inputs of a row are rounded to 15 bits: integers times one factor. The sum of a span is exact.
 * Codes of quantized checkpoints are widened span by span to one of the three, see codes.inc.h. */

enum {
    PANEL_VECTORS = LANES == 16 ? 3 : 2,
    PANEL_OUTPUTS = PANEL_VECTORS * LANES,
    TILE_ROWS = LANES == 16 ? 8 : 6,
    SPAN_INPUTS = 384,         /* a multiple of 64. Sums of more would lose digits, and a span of a panel stays in the cache */
    BLOCK_INPUTS = 256 * 1024, /* entries of the rows that pass a panel: they stay in the second-level cache */
    BLOCK_ROWS = 32 * TILE_ROWS,
    AHEAD = 9216, /* floats from a weight to the one that is prefetched: about a span, which comes while tiles compute */
};

#define ALL_OUTPUTS ((UINT64_C(1) << PANEL_OUTPUTS) - 1) /* of a panel */
#define WHOLE_BYTES(num_inputs) (((num_inputs) + 63) / 64 * 64) /* inputs of a panel of int8 */
#define ROUNDED_SIZE(num_inputs) (WHOLE_BYTES(num_inputs) + 32) /* of rounded rows, in 16 bits. 32: see prepare_rows */

/* How the products of a tile are made. */
enum products {
    OF_FLOAT32, /* from float32 weights and inputs */
    WIDENED,    /* from bfloat16 weights, widened on the way, and float32 inputs */
    IN_PAIRS,   /* from bfloat16 weights and inputs: the instruction adds the products of a pair to the sum */
    IN_MATRICES, /* the same by AMX: an instruction multiplies 16 rows by 16 outputs, for 32 inputs */
    OF_BYTES,    /* from weights in 8 bits and inputs in 15, of which four are in the order 0, 2, 1, 3 */
    BYTES_IN_MATRICES, /* the same by AMX: an input is two signed bytes, a high one and a low one */
};

/* The inputs of a call as the tiles read them: those of the caller, or a copy. */
struct rows {
    const char *first;
    int64_t stride, size; /* of a row and of an input, in bytes */
    enum products products;
    const float *factors; /* [M], of rounded inputs: what the sums are multiplied by */
    const float *scales;  /* [PANEL_OUTPUTS], what the sums of a span are multiplied by, or NULL */
};

static inline vf add_pairs(vf sums, vf weights, vf pairs)
{
#if HAS_BF16_PAIRS
    return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)pairs);
#else
    return sums;
#endif
}

#include "codes.inc.h"

/* Add LANES sums of a span to results, or begin them. `scales` multiply the sums, if there are any: by one instruction, which the
 * compiler would choose for some numbers of rows only. */
static inline void add_sums(float *results, vf sums, int is_first, const float *scales)
{
    vf before = is_first ? (vf){0} : load(results);
    store(results, scales ? multiply_add(sums, load(scales), before) : before + sums);
}

/* Add the products of one span to results [num_rows, PANEL_OUTPUTS], or begin them. `scales`: see `struct rows`. */
static ALWAYS_INLINE void add_span(const char *input, int64_t stride, const float *line, int64_t size,
                                   const enum products products, const int num_rows, int is_first, const float *scales,
                                   float *results)
{
    vf sums[TILE_ROWS][PANEL_VECTORS] = {{{0}}};
    for (int64_t k = 0; k < size; k += products == OF_FLOAT32 ? 1 : 2, line += PANEL_OUTPUTS) {
        vf first[PANEL_VECTORS], second[PANEL_VECTORS];
        UNROLLED for (int v = 0; v < PANEL_VECTORS; v++) {
            vf weights = load(line + v * LANES);
            __builtin_prefetch(line + AHEAD + v * LANES, 0, 2);
            first[v] = products == WIDENED ? (vf)((vi)weights << 16) : weights;
            second[v] = (vf)((vi)weights & (int32_t)0xffff0000);
        }
        for (int half = 0; half < (products == WIDENED ? 2 : 1) && k + half < size; half++, input += sizeof(float))
            UNROLLED for (int row = 0; row < num_rows; row++) {
                vf part = (vf)splat_bits(input + row * stride);
                UNROLLED for (int v = 0; v < PANEL_VECTORS; v++)
                    sums[row][v] = products == IN_PAIRS ? add_pairs(sums[row][v], first[v], part)
                                                        : sums[row][v] + part * (half ? second : first)[v];
            }
    }
    UNROLLED for (int row = 0; row < num_rows; row++)
        UNROLLED for (int v = 0; v < PANEL_VECTORS; v++, results += LANES)
            add_sums(results, sums[row][v], is_first, scales ? scales + v * LANES : NULL);
}

/* As add_span, of bytes. The sums of a span are integers. */
static ALWAYS_INLINE void add_span_of_bytes(const char *input, int64_t stride, const float *line, int64_t size,
                                            const int num_rows, int is_first, const float *scales, float *results)
{
    vi sums[TILE_ROWS][PANEL_VECTORS] = {{{0}}};
    for (int64_t k = 0; k < size; k += 4, line += PANEL_OUTPUTS, input += 4 * sizeof(int16_t)) {
        vi first[PANEL_VECTORS], second[PANEL_VECTORS];
        UNROLLED for (int v = 0; v < PANEL_VECTORS; v++) {
            vh bytes = (vh)load(line + v * LANES);
            __builtin_prefetch(line + AHEAD + v * LANES, 0, 2);
            first[v] = (vi)(bytes << 8 >> 8);
            second[v] = (vi)(bytes >> 8);
        }
        UNROLLED for (int row = 0; row < num_rows; row++)
            UNROLLED for (int v = 0; v < PANEL_VECTORS; v++) {
                sums[row][v] = add_products(sums[row][v], first[v], splat_bits(input + row * stride));
                sums[row][v] = add_products(sums[row][v], second[v], splat_bits(input + row * stride + 4));
            }
    }
    UNROLLED for (int row = 0; row < num_rows; row++)
        UNROLLED for (int v = 0; v < PANEL_VECTORS; v++, results += LANES) {
            vf own = __builtin_convertvector(sums[row][v], vf);
            add_sums(results, own, is_first, scales ? scales + v * LANES : NULL);
        }
}

#if HAS_TILES
/* The compiler wants the numbers of registers as literals. */
#define ZERO_SUMS() \
    _tile_zero(0); \
    _tile_zero(1); \
    _tile_zero(2); \
    _tile_zero(3); \
    _tile_zero(4); \
    _tile_zero(5)
#define LOAD_SUMS(a, b, c, from) \
    _tile_loadd(a, from, LINE); \
    _tile_loadd(b, (from) + LANES, LINE); \
    _tile_loadd(c, (from) + 2 * LANES, LINE)
#define STORE_SUMS(a, b, c, to) \
    _tile_stored(a, to, LINE); \
    _tile_stored(b, (to) + LANES, LINE); \
    _tile_stored(c, (to) + 2 * LANES, LINE)

/* Multiply one tile of inputs or two by the weights of a panel, 64 bytes of each row at a time. Registers 0 to 2 have the sums
 * of the first 16 rows, 3 to 5 those of the next 16, 6 the inputs and 7 the weights. `prefetches`: the weights of the next span. */
static ALWAYS_INLINE void multiply_matrices(const char *input, int64_t stride, const float *line, int64_t num_steps,
                                            int is_double, int prefetches, const int is_bytes)
{
#define MULTIPLY(sums) \
    if (is_bytes) \
        _tile_dpbssd(sums, 6, 7); \
    else \
        _tile_dpbf16ps(sums, 6, 7)
    enum { LINE = PANEL_OUTPUTS * sizeof(float), STEP = 16 * PANEL_OUTPUTS };
    for (; num_steps > 0; num_steps--, input += 64, line += STEP) {
        for (int i = 0; prefetches && i < STEP; i += 16)
            __builtin_prefetch(line + AHEAD + i, 0, 2);
        _tile_loadd(7, line, LINE);
        _tile_loadd(6, input, stride);
        MULTIPLY(0);
        if (is_double) {
            _tile_loadd(6, input + AMX_ROWS * stride, stride);
            MULTIPLY(3);
            _tile_loadd(7, line + LANES, LINE);
            MULTIPLY(4);
            _tile_loadd(6, input, stride);
            MULTIPLY(1);
            _tile_loadd(7, line + 2 * LANES, LINE);
            MULTIPLY(2);
            _tile_loadd(6, input + AMX_ROWS * stride, stride);
            MULTIPLY(5);
        } else {
            _tile_loadd(7, line + LANES, LINE);
            MULTIPLY(1);
            _tile_loadd(7, line + 2 * LANES, LINE);
            MULTIPLY(2);
        }
    }
}

/* As add_span, of a multiple of AMX_INPUTS, for 1 to 16 rows or for 32. */
static void add_span_of_matrices(const char *input, int64_t stride, const float *line, int64_t size, int64_t num_rows,
                                 int is_first, int prefetches, const float *scales, float *results)
{
    enum { LINE = PANEL_OUTPUTS * sizeof(float) };
    float own[2 * AMX_ROWS * PANEL_OUTPUTS] __attribute__((aligned(64)));
    const int is_double = num_rows > AMX_ROWS;
    float *sums = scales ? own : results, *more = sums + AMX_ROWS * PANEL_OUTPUTS;
    if (amx_rows != (is_double ? AMX_ROWS : num_rows))
        configure_registers(is_double ? AMX_ROWS : num_rows);
    if (is_first || scales) {
        ZERO_SUMS();
    } else {
        LOAD_SUMS(0, 1, 2, sums);
        if (is_double) {
            LOAD_SUMS(3, 4, 5, more);
        }
    }
    multiply_matrices(input, stride, line, size / AMX_INPUTS, is_double, prefetches, 0);
    STORE_SUMS(0, 1, 2, sums);
    if (is_double) {
        STORE_SUMS(3, 4, 5, more);
    }
    for (int64_t row = 0; scales && row < num_rows; row++, sums += PANEL_OUTPUTS)
        UNROLLED for (int v = 0; v < PANEL_VECTORS; v++, results += LANES)
            add_sums(results, load(sums + v * LANES), is_first, scales + v * LANES);
}

/* As add_span_of_bytes, for 1 to 8 rows or for 16. A row has its high bytes, and as far behind them its low ones: in the tiles
 * these are two rows. */
static void add_span_of_byte_matrices(const char *input, int64_t stride, const float *line, int64_t size, int64_t num_rows,
                                      int is_first, int prefetches, const float *scales, float *results)
{
    enum { LINE = PANEL_OUTPUTS * sizeof(float) };
    const int is_double = 2 * num_rows > AMX_ROWS;
    int32_t sums[2 * AMX_ROWS * PANEL_OUTPUTS] __attribute__((aligned(64)));
    if (amx_rows != (is_double ? AMX_ROWS : 2 * num_rows))
        configure_registers(is_double ? AMX_ROWS : 2 * num_rows);
    ZERO_SUMS();
    multiply_matrices(input, stride / 2, line, size / AMX_BYTES, is_double, prefetches, 1);
    STORE_SUMS(0, 1, 2, sums);
    if (is_double) {
        STORE_SUMS(3, 4, 5, sums + AMX_ROWS * PANEL_OUTPUTS);
    }
    for (const float *high = (const float *)sums; num_rows > 0; num_rows--, high += 2 * PANEL_OUTPUTS)
        UNROLLED for (int v = 0; v < PANEL_VECTORS; v++, results += LANES) {
            vi sum = (vi)load(high + v * LANES) * 256 + (vi)load(high + PANEL_OUTPUTS + v * LANES);
            vf own = __builtin_convertvector(sum, vf);
            add_sums(results, own, is_first, scales ? scales + v * LANES : NULL);
        }
}
#endif

/* The compiler makes a version of add_span for each number of rows and each kind of products. */
#define ADD_SPAN(num_rows) \
    case num_rows: \
        if (rows.products == OF_FLOAT32) \
            add_span(input, rows.stride, line, size, OF_FLOAT32, num_rows, is_first, rows.scales, results); \
        else if (HAS_BF16_PAIRS && (rows.products == IN_PAIRS || rows.products == IN_MATRICES)) \
            add_span(input, rows.stride, line, size, IN_PAIRS, num_rows, is_first, rows.scales, results); \
        else if (rows.products == OF_BYTES) \
            add_span_of_bytes(input, rows.stride, line, size, num_rows, is_first, rows.scales, results); \
        else \
            add_span(input, rows.stride, line, size, WIDENED, num_rows, is_first, rows.scales, results); \
        break;

static __attribute__((noinline)) void add_tile(struct rows rows, const char *input, const float *line, int64_t size,
                                               int64_t num_rows, int is_first, int prefetches, float *results)
{
#if HAS_TILES
    if (rows.products == BYTES_IN_MATRICES) {
        int64_t first = num_rows < AMX_ROWS ? smaller(AMX_ROWS / 2, num_rows) : num_rows, rest = num_rows - first;
        add_span_of_byte_matrices(input, rows.stride, line, size, first, is_first, prefetches, rows.scales, results);
        if (rest > 0)
            add_span_of_byte_matrices(input + first * rows.stride, rows.stride, line, size, rest, is_first, 0, rows.scales,
                                      results + first * PANEL_OUTPUTS);
        return;
    }
    int64_t whole = size / AMX_INPUTS * AMX_INPUTS;
    if (rows.products == IN_MATRICES && whole > 0) {
        int64_t first = num_rows < 2 * AMX_ROWS ? smaller(AMX_ROWS, num_rows) : num_rows, rest = num_rows - first;
        add_span_of_matrices(input, rows.stride, line, whole, first, is_first, prefetches, rows.scales, results);
        if (rest > 0)
            add_span_of_matrices(input + first * rows.stride, rows.stride, line, whole, rest, is_first, 0, rows.scales,
                                 results + first * PANEL_OUTPUTS);
        if (whole == size)
            return;
        input += whole * sizeof(uint16_t);
        line += whole / 2 * PANEL_OUTPUTS;
        size -= whole;
        is_first = 0;
    }
    for (; num_rows > TILE_ROWS; num_rows -= TILE_ROWS) {
        add_tile(rows, input, line, size, TILE_ROWS, is_first, 0, results);
        input += TILE_ROWS * rows.stride;
        results += TILE_ROWS * PANEL_OUTPUTS;
    }
#endif
    switch (num_rows) {
        ADD_SPAN(1) ADD_SPAN(2) ADD_SPAN(3) ADD_SPAN(4) ADD_SPAN(5) ADD_SPAN(6)
#if LANES == 16
        ADD_SPAN(7) ADD_SPAN(8)
#endif
    }
}

/* Return the number of rows of a whole tile. */
static int64_t most_rows(struct rows rows)
{
#if HAS_TILES
    if (rows.products == IN_MATRICES)
        return 2 * AMX_ROWS;
    if (rows.products == BYTES_IN_MATRICES)
        return AMX_ROWS;
#endif
    return TILE_ROWS;
}

/* --- the calls --- */

/* Where the outputs go if the call has no output: to `leaders`, or to `largest`. */
struct sink {
    struct leader *leaders; /* [threads, M] */
    float *largest;         /* [M, panels], the largest output of each panel */
};

static int64_t num_panels(const struct linear *c)
{
    return (c->num_outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
}

/* Return a bit for each output of a panel that exists and is allowed for the row. */
static inline uint64_t allowed_outputs(const struct linear *c, int64_t row, int64_t panel)
{
    uint64_t bits = ~UINT64_C(0);
    if (c->allowed)
        memcpy(&bits, c->allowed + (row * num_panels(c) + panel) * (PANEL_OUTPUTS / 8), sizeof bits);
    return bits & ALL_OUTPUTS >> (PANEL_OUTPUTS - smaller(PANEL_OUTPUTS, c->num_outputs - panel * PANEL_OUTPUTS));
}

/* Scale the finished sums of a tile, add the bias, and pass the outputs on. */
static void finish_tile(const struct linear *c, struct rows rows, float *sums, int64_t first_row, int64_t num_rows,
                        int64_t panel, struct sink sink)
{
    int64_t first_output = panel * PANEL_OUTPUTS, num_outputs = smaller(PANEL_OUTPUTS, c->num_outputs - first_output);
    for (int64_t row = first_row; row < first_row + num_rows; row++, sums += PANEL_OUTPUTS) {
        for (int v = 0; rows.factors && !sink.largest && v < PANEL_VECTORS; v++) {
            vf scales = splat(rows.factors[row]);
            if (c->weight_scales)
                scales *= load(c->weight_scales + first_output + v * LANES);
            store(sums + v * LANES, load(sums + v * LANES) * scales);
        }
        for (int64_t i = 0; c->bias && i < num_outputs; i++)
            sums[i] += c->bias[first_output + i];
        if (c->output) {
            int64_t at = row * c->num_outputs + first_output;
            for (int64_t i = 0; c->accumulates && i < num_outputs; i++)
                sums[i] += item(c->output, at + i, c->output_dtype);
#if HAS_BF16_PAIRS
            if (c->output_dtype == BFLOAT16 && num_outputs == PANEL_OUTPUTS) {
                for (int v = 0; v < PANEL_VECTORS; v++) {
                    __m256bh rounded = _mm512_cvtneps_pbh((__m512)load(sums + v * LANES));
                    memcpy((uint16_t *)c->output + at + v * LANES, &rounded, sizeof rounded);
                }
                continue;
            }
#endif
            narrow(c->output, at, sums, num_outputs, c->output_dtype, 1.0f);
            continue;
        }
        uint64_t bits = allowed_outputs(c, row, panel);
        for (int v = 0; bits != ALL_OUTPUTS && v < PANEL_VECTORS; v++)
            exclude(sums + v * LANES, bits >> v * LANES);
        vf largest = load(sums);
        vi ids = first_ints() + (int32_t)first_output;
        for (int v = 0; v < PANEL_VECTORS; v++, ids += LANES)
            if (sink.leaders)
                compare(sink.leaders + row, load(sums + v * LANES), ids);
            else
                largest = larger(largest, load(sums + v * LANES));
        if (sink.largest)
            sink.largest[row * num_panels(c) + panel] = largest_lane(largest) * rows.factors[row] * c->scales[panel];
    }
}

/* Compute some rows of a panel. `sums` is [num_rows, PANEL_OUTPUTS], and `span` memory for SPAN_INPUTS weights of it. A tile
 * is finished before the next one, so that the processor writes the outputs while it multiplies. */
static void compute_panel(const struct linear *c, struct rows rows, int64_t first_row, int64_t num_rows, int64_t panel,
                          float *sums, float *span, struct sink sink)
{
    int is_rounded = rows.factors != NULL, is_pairs = rows.products == IN_PAIRS || rows.products == IN_MATRICES;
    int has_codes = c->weight_dtype >= CODES_4;
    int by_group = has_codes && c->by_group && (is_rounded || c->weight_dtype == FLOATS_8);
    int64_t per_line = c->weight_dtype == FLOAT32 ? 1 : c->weight_dtype == BFLOAT16 ? 2 : c->weight_dtype == CODES_4 ? 8 : 4;
    int64_t num_inputs = is_rounded ? WHOLE_BYTES(c->num_inputs) : c->num_inputs;
    int64_t lines = per_line >= 4 ? WHOLE_BYTES(c->num_inputs) / per_line : (num_inputs + per_line - 1) / per_line;
    const float *first_line = (const float *)c->panels + panel * lines * PANEL_OUTPUTS;
    int64_t most = most_rows(rows), num_tiles = (num_rows + most - 1) / most;
    int is_matrix = rows.products == IN_MATRICES || rows.products == BYTES_IN_MATRICES;
    int64_t per_tile = is_matrix ? most : (num_rows + num_tiles - 1) / num_tiles;
    int64_t group_size = by_group && c->num_groups > 1 ? num_inputs / c->num_groups : num_inputs;
    for (int64_t k = 0, size; k < num_inputs; k += size) {
        size = smaller(smaller(SPAN_INPUTS, num_inputs - k), group_size - k % group_size);
        const float *line = first_line + k / per_line * PANEL_OUTPUTS, *weights = line;
        int64_t group = panel * c->num_groups + k / group_size;
        rows.scales = by_group ? c->code_scales + group * PANEL_OUTPUTS : NULL;
        if (has_codes && !(is_rounded && c->weight_dtype == CODES_8)) {
            weights = span;
            if (is_rounded)
                widen_to_bytes(c, line, group, size, span);
            else
                widen_codes(c, line, panel, k, size, !by_group, is_pairs, span);
        }
        for (int64_t from = 0; from < num_rows; from += per_tile) {
            int64_t to = smaller(from + per_tile, num_rows), row = first_row + from;
            float *sums_of_tile = sums + from * PANEL_OUTPUTS;
            add_tile(rows, rows.first + row * rows.stride + k * rows.size, weights, size, to - from, k == 0,
                     from == 0 && weights == line, sums_of_tile);
            if (k + size == num_inputs)
                finish_tile(c, rows, sums_of_tile, row, to - from, panel, sink);
        }
    }
}

/* Return what integers of at most `limit` are to be multiplied by to be the numbers. NaN if one is not finite. */
static float factor_of(const void *from, int64_t offset, int64_t count, int64_t dtype, float limit)
{
    vf largest = splat(1e-30f), sum = {0};
    for (int64_t k = 0; k < count; k += LANES) {
        vf numbers = load_some(from, offset + k, dtype, count - k);
        largest = larger((vf)((vi)numbers & 0x7fffffff), largest);
        sum += numbers * splat(0.0f);
    }
    return largest_lane(largest) / limit + sum_of_lanes(sum);
}

/* Round LANES numbers to integers, or fewer. */
static inline vi round_some(const void *from, int64_t offset, int64_t count, int64_t dtype, float factor)
{
    const vf rounder = splat(12582912.0f); /* the integer is in the low bits then, see v_exp */
    return (vi)(load_some(from, offset, dtype, count) / splat(factor) + rounder) - (vi)rounder;
}

/* Round the inputs of a row to 15 bits. Return their factor. */
static float round_row(const struct linear *c, int64_t row, enum products products, char *to, int64_t row_bytes)
{
    int64_t first = row * c->num_inputs;
    float factor = factor_of(c->input, first, c->num_inputs, c->input_dtype, 16383.0f);
    int64_t end = (c->num_inputs + LANES - 1) / LANES * LANES;
    for (int64_t k = 0; k < end; k += LANES) {
        vi integers = round_some(c->input, first + k, c->num_inputs - k, c->input_dtype, factor);
#if HAS_TILES
        if (products == BYTES_IN_MATRICES) {
            _mm_storeu_si128((__m128i *)(to + k), _mm512_cvtepi32_epi8((__m512i)((integers + 128) >> 8)));
            _mm_storeu_si128((__m128i *)(to + row_bytes / 2 + k), _mm512_cvtepi32_epi8((__m512i)integers));
            continue;
        }
#endif
        vs shorts = __builtin_convertvector(swap_middle(integers), vs);
        memcpy(to + 2 * k, &shorts, sizeof shorts);
    }
    int64_t rest = WHOLE_BYTES(c->num_inputs) - end;
    if (products == BYTES_IN_MATRICES) {
        memset(to + end, 0, rest);
        memset(to + row_bytes / 2 + end, 0, rest);
    } else
        memset(to + 2 * end, 0, 2 * rest);
    return factor;
}

/* Round the inputs into memory [M, row_bytes], and fill the factors [M]. */
static struct rows round_rows(const struct linear *c, enum products products, char *rounded, int64_t row_bytes, float *factors)
{
    int num_threads = c->num_rows * c->num_inputs < SMALL_WORK ? 1 : c->num_threads;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < c->num_rows; row++)
        factors[row] = round_row(c, row, products, rounded + row * row_bytes, row_bytes);
    return (struct rows){rounded, row_bytes, products == BYTES_IN_MATRICES ? 1 : 2, products, factors, NULL};
}

/* Make `rows` of the input. If it has to be copied, `copy` is to be freed. Return 0, or -1 if there is no memory.
 * Rows whose distance is a power of 2 would displace each other from the cache. */
static int prepare_rows(const struct linear *c, struct rows *rows, char **copy)
{
    if (c->weight_dtype == INT8 || c->rounds) {
        int64_t row_bytes = 2 * ROUNDED_SIZE(c->num_inputs);
        if (!(*copy = malloc(c->num_rows * (row_bytes + sizeof(float)))))
            return -1;
        float *factors = (float *)(*copy + c->num_rows * row_bytes);
        *rows = round_rows(c, HAS_TILES ? BYTES_IN_MATRICES : OF_BYTES, *copy, row_bytes, factors);
        return 0;
    }
    int is_bfloat16 = c->weight_dtype != FLOAT32 && HAS_BF16_PAIRS && c->input_dtype == BFLOAT16;
    enum products products = is_bfloat16                     ? HAS_TILES ? IN_MATRICES : IN_PAIRS
                             : c->weight_dtype == BFLOAT16 ? WIDENED
                                                           : OF_FLOAT32;
    int64_t size = is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
    int is_direct = is_bfloat16 ? c->num_inputs % 2 == 0 : c->input_dtype == FLOAT32;
    *rows = (struct rows){c->input, c->num_inputs * size, size, products, NULL, NULL};
    *copy = NULL;
    if (is_direct && (c->num_rows <= 4 * TILE_ROWS || rows->stride % 2048 != 0))
        return 0;
    rows->stride += 64 + rows->stride % 4;
    if (!(*copy = malloc(c->num_rows * rows->stride + 1)))
        return -1;
    rows->first = *copy;
    for (int64_t row = 0; row < c->num_rows; row++) {
        char *to = *copy + row * rows->stride;
        if (is_bfloat16) {
            memcpy(to, (const char *)c->input + row * c->num_inputs * size, c->num_inputs * size);
            memset(to + c->num_inputs * size, 0, size);
        } else
            widen((float *)to, c->input, row * c->num_inputs, c->num_inputs, c->input_dtype);
    }
    return 0;
}

/* Return how many rows pass a panel at a time. */
static int64_t block_rows(const struct linear *c, struct rows rows)
{
    int64_t least = 4 * TILE_ROWS, inputs = rows.products == IN_MATRICES ? 3 * BLOCK_INPUTS : BLOCK_INPUTS;
    int64_t block = inputs / c->num_inputs / most_rows(rows) * most_rows(rows);
    return smaller(block > least ? block : least, BLOCK_ROWS);
}

/* Compute the panels of `kept` [M, panels] for each row, or all. */
static void compute_panels(const struct linear *c, struct rows rows, const char *kept, struct sink sink, int num_threads)
{
    int64_t block = block_rows(c, rows), panels = num_panels(c), units = (c->num_rows + block - 1) / block * panels;
#pragma omp parallel num_threads(num_threads)
    {
        float sums[BLOCK_ROWS * PANEL_OUTPUTS] __attribute__((aligned(64)));
        float span[SPAN_INPUTS * PANEL_OUTPUTS] __attribute__((aligned(64)));
        struct sink own = sink;
        own.leaders = sink.leaders ? sink.leaders + omp_get_thread_num() * c->num_rows : NULL;
        /* Units are not divided in advance: a thread that loses its core for a while takes fewer than the others. */
#pragma omp for schedule(monotonic : dynamic, 1 + units / (16 * num_threads)) nowait /* ids of a thread ascend */
        for (int64_t unit = 0; unit < units; unit++) {
            int64_t panel = unit % panels, first = unit / panels * block, end = smaller(first + block, c->num_rows);
            int64_t begin = first; /* of rows that follow one another: they share tiles */
            for (int64_t row = first; row <= end; row++)
                if (row == end || (kept && !kept[row * panels + panel])) {
                    if (begin < row)
                        compute_panel(c, rows, begin, row - begin, panel, sums, span, own);
                    begin = row + 1;
                }
        }
        release_registers();
    }
}

/* Find the panels that can have a row's largest allowed output. Return 1 or 0 for each, [M, panels], or NULL if so many are
 * left that it does not pay. `memory` has 5 bytes for each panel of each row, and 4 and a rounded row for each row.
 * Rounded weights take a quarter of the memory and half the time. By the inequality of Cauchy and Schwarz those outputs differ
 * from the exact ones at most by the length of the row times the error of the panel. A NaN is kept. */
static const char *screen(const struct linear *c, char *memory, int num_threads)
{
    int64_t panels = num_panels(c), num_kept = 0, few = c->num_rows * panels / 8;
    int64_t row_bytes = 2 * ROUNDED_SIZE(c->num_inputs);
    float *largest = (float *)memory, *factors = largest + c->num_rows * panels;
    char *inputs = (char *)(factors + c->num_rows), *kept = inputs + c->num_rows * row_bytes;
    for (int64_t i = 0, row = 0; row < c->num_rows; row++)
        for (int64_t panel = 0; panel < panels; panel++, i++)
            num_kept += kept[i] = !c->allowed || allowed_outputs(c, row, panel) != 0;
    if (!c->rounded || num_kept <= few)
        return kept;
    struct linear rounded = *c;
    rounded.panels = c->rounded;
    rounded.weight_dtype = INT8;
    compute_panels(&rounded, round_rows(c, HAS_TILES ? BYTES_IN_MATRICES : OF_BYTES, inputs, row_bytes, factors),
                   num_kept < c->num_rows * panels ? kept : NULL, (struct sink){NULL, largest}, num_threads);
    num_kept = 0;
#pragma omp parallel for schedule(static) num_threads(num_threads) reduction(+ : num_kept)
    for (int64_t row = 0; row < c->num_rows; row++) {
        float length = sqrtf(sum_of_squares(c->input, row * c->num_inputs, c->num_inputs, FLOAT32) + 1e-30f);
        float least = -INFINITY;
        for (int64_t i = row * panels, panel = 0; panel < panels; panel++, i++)
            if (kept[i])
                least = fmaxf(least, largest[i] - length * c->errors[panel]);
        for (int64_t i = row * panels, panel = 0; panel < panels; panel++, i++)
            num_kept += kept[i] = kept[i] && !(largest[i] + length * c->errors[panel] < least);
    }
    return num_kept <= few ? kept : NULL;
}

static int find_peaks(const struct linear *c, struct rows rows, int num_threads)
{
    struct leader *leaders = aligned_alloc(sizeof(vf), (num_threads * c->num_rows + 1) * sizeof(struct leader));
    if (!leaders)
        return -1;
    for (int64_t i = 0; i < num_threads * c->num_rows; i++)
        leaders[i] = (struct leader)NO_LEADER;
    char *memory = malloc(c->num_rows * (5 * num_panels(c) + 4 + 2 * ROUNDED_SIZE(c->num_inputs)));
    const char *kept = memory ? screen(c, memory, num_threads) : NULL;
    compute_panels(c, rows, kept, (struct sink){leaders, NULL}, num_threads);
    for (int64_t row = 0; row < c->num_rows; row++)
        find_leader(leaders + row, num_threads, c->num_rows, c->peaks + row, c->token_ids + row);
    free(memory);
    free(leaders);
    return 0;
}

static int linear(const struct linear *c)
{
    struct rows rows;
    char *copy;
    if (prepare_rows(c, &rows, &copy) != 0)
        return -1;
    struct region region = begin_region(c->num_rows * c->num_outputs * c->num_inputs, c->num_threads);
    int status = c->output ? 0 : find_peaks(c, rows, region.num_threads);
    if (c->output)
        compute_panels(c, rows, NULL, (struct sink){NULL, NULL}, region.num_threads);
    end_region(region);
    free(copy);
    return status;
}

/* --- packing --- */

/* Copy some inputs of an output, from `first` on, to its place in a panel. `first` is even. */
static inline void pack_inputs(const struct packing *c, int64_t output, uint32_t *panel, int64_t first, int64_t size)
{
    int64_t per_line = c->dtype == BFLOAT16 ? 2 : 1, whole = size / per_line;
    const char *from = (const char *)c->weights + (output * c->num_inputs + first) * (4 / per_line);
    uint32_t *to = panel + first / per_line * PANEL_OUTPUTS + (c->first_output + output) % PANEL_OUTPUTS;
    for (int64_t line = 0; line < whole; line++) /* memcpy: a row of bfloat16 need not be aligned */
        memcpy(to + line * PANEL_OUTPUTS, from + line * 4, 4);
    if (size % per_line != 0)
        memcpy(to + whole * PANEL_OUTPUTS, from + whole * 4, 2);
}

/* As pack_inputs: round them to 8 bits. */
static inline void pack_bytes(const struct packing *c, int64_t output, uint32_t *panel, int64_t first, int64_t size)
{
    float factor = c->scales[c->first_output + output];
    for (int64_t k = first; k < first + size; k += LANES) {
        vi integers = round_some(c->weights, output * c->num_inputs + k, first + size - k, c->dtype, factor);
        uint32_t *to = panel + k / 4 * PANEL_OUTPUTS + (c->first_output + output) % PANEL_OUTPUTS;
        for (int i = 0; i < LANES; i += 4, to += PANEL_OUTPUTS)
            *to = (integers[i] & 255) | (integers[i + 1] & 255) << 8 | (integers[i + 2] & 255) << 16 |
                  (uint32_t)integers[i + 3] << 24;
    }
}

static int64_t num_lines(const struct packing *c)
{
    if (c->scales)
        return WHOLE_BYTES(c->num_inputs) / 4;
    return c->dtype == FLOAT32 ? c->num_inputs : (c->num_inputs + 1) / 2;
}

static void pack(const struct packing *c)
{
    enum { INPUTS = 64 }; /* their lines of a panel stay in the cache while the outputs are copied */
    int64_t lines = num_lines(c);
    int64_t end = c->first_output + c->num_outputs, last_panel = (end - 1) / PANEL_OUTPUTS;
#pragma omp parallel for schedule(static) num_threads(c->num_threads)
    for (int64_t panel = c->first_output / PANEL_OUTPUTS; panel <= last_panel; panel++) {
        int64_t before = panel * PANEL_OUTPUTS - c->first_output, first = before > 0 ? before : 0;
        int64_t last = smaller(before + PANEL_OUTPUTS, c->num_outputs);
        uint32_t *to = (uint32_t *)c->panels + panel * lines * PANEL_OUTPUTS;
        for (int64_t output = first; c->scales && output < last; output++)
            c->scales[c->first_output + output] =
                factor_of(c->weights, output * c->num_inputs, c->num_inputs, c->dtype, 127.0f);
        for (int64_t k = 0; k < c->num_inputs; k += INPUTS)
            for (int64_t output = first; output < last; output++)
                if (c->scales)
                    pack_bytes(c, output, to, k, smaller(INPUTS, c->num_inputs - k));
                else
                    pack_inputs(c, output, to, k, smaller(INPUTS, c->num_inputs - k));
    }
}

/* A weight costs a cache line: about the time of 16 multiplications. A step begins with this, when the other threads may sleep.
 * That they come late does not mean that the cores are busy: so there is no end_region. */
static void unpack(const struct packing *c)
{
    int64_t size = c->dtype == BFLOAT16 ? 2 : 4, lines = num_lines(c);
    struct region region = begin_region(16 * c->num_outputs * lines, c->num_threads);
#pragma omp parallel for num_threads(region.num_threads) schedule(static)
    for (int64_t i = 0; i < c->num_outputs; i++) {
        int64_t panel = c->output_ids[i] / PANEL_OUTPUTS;
        const uint32_t *from = (uint32_t *)c->panels + panel * lines * PANEL_OUTPUTS + c->output_ids[i] % PANEL_OUTPUTS;
        char *to = (char *)c->weights + i * c->num_inputs * size;
        for (int64_t k = 0; c->scales && k < c->num_inputs; k++) {
            int8_t byte = (int8_t)(from[k / 4 * PANEL_OUTPUTS] >> k % 4 * 8);
            put(to, k, byte * c->scales[c->output_ids[i]], c->dtype);
        }
        if (c->scales)
            continue;
        for (int64_t line = 0; line < lines - 1; line++, from += PANEL_OUTPUTS)
            memcpy(to + line * 4, from, 4);
        memcpy(to + (lines - 1) * 4, from, c->num_inputs * size - (lines - 1) * 4);
    }
}
