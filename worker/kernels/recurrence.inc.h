/* Layers that keep a state: a short convolution, then a recurrence over the tokens, then a gated norm. */

enum {
    MOST_TAPS = 8,    /* of a convolution */
    PART_TOKENS = 256, /* that pass a layer at a time, so that what is between its phases stays in the cache */
    FACTORS = 3,
};

static inline float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

static inline float softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

/* The tokens of a part of a step, and what the phases leave for each other. */
struct step_part {
    int64_t begin, end;
    int64_t first_row, end_row; /* rows that have tokens in the part */
    float *mixed;               /* [end - begin, C], the convolved entries */
    float *factors;             /* [end - begin, Hv, FACTORS], of the state, of what a token adds to it, log of the first */
    float *results;             /* [end - begin, Hv, Dv] */
};

/* The tokens of a row in a part. */
struct row_tokens {
    int64_t begin, end, slot;
    int begins_sequence;
};

static inline struct row_tokens tokens_of_row(const struct recurrence *c, const struct step_part *part, int64_t row)
{
    int64_t begin = c->query_starts[row], end = c->query_starts[row + 1];
    int64_t first = begin > part->begin ? begin : part->begin;
    return (struct row_tokens){first, smaller(end, part->end), c->slots[row], c->is_new[row] && first == begin};
}

/* Convolve some channels of a row's tokens: output[t] = sum of weights[i] * input[t - taps + 1 + i]. */
static void convolve_channels(const struct recurrence *c, const struct step_part *part, struct row_tokens row, int64_t channel)
{
    float window[MOST_TAPS][CHUNK]; /* the last inputs, that of token t at t % taps */
    int64_t taps = c->num_taps, count = smaller(CHUNK, c->num_channels - channel);
    for (int64_t i = 1; i < taps; i++) {
        float *state = c->conv_states + (row.slot * (taps - 1) + i - 1) * c->num_channels + channel;
        float *to = window[(row.begin + i) % taps];
        memset(to, 0, sizeof window[0]);
        if (!row.begins_sequence)
            memcpy(to, state, count * sizeof(float));
    }
    for (int64_t t = row.begin; t < row.end; t++) {
        const float *inputs[MOST_TAPS];
        for (int64_t tap = 0; tap < taps; tap++)
            inputs[tap] = window[(t + 1 + tap) % taps];
        float *newest = window[t % taps];
        int64_t input = t * c->width + channel;
        float *mixed = part->mixed + (t - part->begin) * c->num_channels + channel;
        for (int64_t i = 0; i < count; i += LANES) {
            int64_t lanes = smaller(LANES, count - i);
            vf entries = load_some(c->input, input + c->conv_at + i, c->dtype, lanes);
            if (c->rule == CONVOLUTION)
                entries *= load_some(c->input, input + c->factor_at + i, c->dtype, lanes);
            store(newest + i, entries);
            vf sum = c->conv_bias == NULL ? splat(0) : load_some(c->conv_bias, channel + i, FLOAT32, lanes);
            for (int64_t tap = 0; tap < taps; tap++)
                sum += load_some(c->conv_weights, tap * c->num_channels + channel + i, FLOAT32, lanes) *
                       load(inputs[tap] + i);
            if (c->rule != CONVOLUTION)
                sum = activated(sum, SILU);
            store_some(mixed + i, sum, lanes);
        }
    }
    for (int64_t i = 1; i < taps; i++)
        memcpy(c->conv_states + (row.slot * (taps - 1) + i - 1) * c->num_channels + channel,
               window[(row.end + i) % taps], count * sizeof(float));
}

static void convolve(const struct recurrence *c, const struct step_part *part)
{
    int64_t chunks = (c->num_channels + CHUNK - 1) / CHUNK, num_rows = part->end_row - part->first_row;
    struct region region =
        begin_region((part->end - part->begin) * c->num_channels * 2 * c->num_taps, c->num_threads);
#pragma omp parallel for num_threads(region.num_threads) schedule(dynamic)
    for (int64_t unit = 0; unit < num_rows * chunks; unit++)
        convolve_channels(c, part, tokens_of_row(c, part, part->first_row + unit / chunks), unit % chunks * CHUNK);
    end_region(region);
}

static void scale_to_length_1(float *vector, int64_t size, float factor)
{
    float scale = factor / sqrtf(sum_of_squares(vector, 0, size, FLOAT32) + 1e-6f);
    for (int64_t i = 0; i < size; i++)
        vector[i] *= scale;
}

/* Compute the factors of a token, and with the delta rule normalize its queries and keys. */
static void prepare_token(const struct recurrence *c, const struct step_part *part, int64_t t)
{
    float *mixed = part->mixed + (t - part->begin) * c->num_channels;
    float *factors = part->factors + (t - part->begin) * c->num_heads * FACTORS;
    for (int64_t head = 0; head < c->num_heads; head++, factors += FACTORS) {
        float step = softplus(item(c->input, t * c->width + c->step_at + head, c->dtype) + c->step_bias[head]);
        factors[2] = c->rates[head] * step;
        factors[0] = expf(factors[2]);
        factors[1] =
            c->rule == STATE_SPACE
                ? step
                : c->gain * sigmoid(item(c->input, t * c->width + c->gain_at + head, c->dtype));
    }
    if (c->rule == DELTA_RULE)
        for (int64_t head = 0; head < c->num_key_heads; head++) {
            scale_to_length_1(mixed + c->query_at + head * c->key_dim, c->key_dim, 1.0f / sqrtf(c->key_dim));
            scale_to_length_1(mixed + c->key_at + head * c->key_dim, c->key_dim, 1.0f);
        }
}

static inline float *state_of(const struct recurrence *c, int64_t slot, int64_t head)
{
    return c->states + (slot * c->num_heads + head) * c->state_dim * c->key_dim;
}

/* Run the recurrence of `n` vectors of a head's values over the tokens of a row. Their part of the state is contiguous, or
 * its lines would compete for the same places of the nearest cache. */
static ALWAYS_INLINE void recur_columns(const struct recurrence *c, const struct step_part *part, struct row_tokens row,
                                        int64_t head, int64_t column, const int n)
{
    const int64_t stride = n * LANES;
    int64_t key_head = head / (c->num_heads / c->num_key_heads);
    float *state = state_of(c, row.slot, head) + column * c->key_dim;
    int64_t lanes = smaller(n * LANES, c->value_dim - column);
    vf skip = splat(c->skips == NULL ? 0 : c->skips[head]);
    for (int64_t t = row.begin; t < row.end; t++) {
        const float *mixed = part->mixed + (t - part->begin) * c->num_channels;
        const float *query = mixed + c->query_at + key_head * c->key_dim;
        const float *key = mixed + c->key_at + key_head * c->key_dim;
        const float *factors = part->factors + ((t - part->begin) * c->num_heads + head) * FACTORS;
        vf decay = splat(factors[0]), gain = splat(factors[1]), values[n], added[n], sums[n];
        UNROLLED for (int j = 0; j < n; j++) {
            int64_t at = c->value_at + head * c->value_dim + column + j * LANES;
            values[j] = load_some(mixed, at, FLOAT32, smaller(LANES, lanes - j * LANES));
            sums[j] = splat(0);
        }
        if (c->rule == DELTA_RULE)
            for (int64_t i = 0; i < c->key_dim; i++) {
                vf entry = splat(key[i]);
                UNROLLED for (int j = 0; j < n; j++) sums[j] += load(state + i * stride + j * LANES) * entry;
            }
        UNROLLED for (int j = 0; j < n; j++) {
            added[j] = (values[j] - decay * sums[j]) * gain;
            sums[j] = values[j] * skip;
        }
        for (int64_t i = 0; i < c->key_dim; i++) {
            vf key_entry = splat(key[i]), query_entry = splat(query[i]);
            UNROLLED for (int j = 0; j < n; j++) {
                float *at = state + i * stride + j * LANES;
                vf entry = load(at) * decay + key_entry * added[j];
                store(at, entry);
                sums[j] += entry * query_entry;
            }
        }
        float *results = part->results + ((t - part->begin) * c->num_heads + head) * c->value_dim + column;
        UNROLLED for (int j = 0; j < n; j++)
            store_some(results + j * LANES, sums[j], smaller(LANES, lanes - j * LANES));
    }
}

#include "recurrence_matrices.inc.h"

/* Run the recurrence of a head over the tokens of a row. */
static void recur_head(const struct recurrence *c, const struct step_part *part, struct row_tokens row, int64_t head)
{
    int64_t columns = padded(c->value_dim), wide = columns / (4 * LANES) * 4 * LANES;
    if (row.begins_sequence)
        memset(state_of(c, row.slot, head), 0, columns * c->key_dim * sizeof(float));
#if HAS_TILES
    if (row.end - row.begin >= GROUP_TOKENS && uses_groups(c)) {
        struct group group;
        for (; row.end - row.begin >= GROUP_TOKENS; row.begin += GROUP_TOKENS)
            recur_group(c, part, row.begin - part->begin, head, state_of(c, row.slot, head), &group);
        release_registers();
    }
#endif
    for (int64_t column = 0; column < wide; column += 4 * LANES)
        recur_columns(c, part, row, head, column, 4);
    for (int64_t column = wide; column < columns; column += LANES)
        recur_columns(c, part, row, head, column, 1);
}

static void recur(const struct recurrence *c, const struct step_part *part)
{
    int64_t num_rows = part->end_row - part->first_row, num_tokens = part->end - part->begin;
    struct region region = begin_region(num_tokens * c->num_heads * c->key_dim * c->state_dim * 3, c->num_threads);
#pragma omp parallel for num_threads(region.num_threads) schedule(dynamic)
    for (int64_t unit = 0; unit < num_rows * c->num_heads; unit++)
        recur_head(c, part, tokens_of_row(c, part, part->first_row + unit / c->num_heads), unit % c->num_heads);
    end_region(region);
}

/* Write a token's results: normalized, and multiplied by the SiLU of its gates before or after that. */
static void finish_token(const struct recurrence *c, const struct step_part *part, int64_t t)
{
    int64_t size = c->num_heads * c->value_dim, group = c->norm_size;
    float *results = part->results + (t - part->begin) * size;
    float gates[CHUNK];
    for (int pass = 0; pass < 2; pass++) {
        if (pass == !c->gates_first)
            for (int64_t first = 0; first < size; first += CHUNK) {
                int64_t count = smaller(CHUNK, size - first);
                for (int64_t i = 0; i < count; i += LANES) {
                    vf gate = load_some(c->input, t * c->width + c->gate_at + first + i, c->dtype, smaller(LANES, count - i));
                    store(gates + i, activated(gate, SILU));
                }
                for (int64_t i = 0; i < count; i++)
                    results[first + i] *= gates[i];
            }
        else if (c->norm_weights != NULL)
            for (int64_t first = 0; first < size; first += group) {
                float factor = 1.0f / sqrtf(sum_of_squares(results, first, group, FLOAT32) / group + c->epsilon);
                for (int64_t i = first; i < first + group; i++)
                    results[i] *= factor * c->norm_weights[i];
            }
    }
    narrow(c->output, t * size, results, size, c->dtype, 1.0f);
}

/* Write a token's convolved entries, multiplied by its gates. */
static void finish_convolved(const struct recurrence *c, const struct step_part *part, int64_t t)
{
    float *mixed = part->mixed + (t - part->begin) * c->num_channels;
    for (int64_t i = 0; i < c->num_channels; i++)
        mixed[i] *= item(c->input, t * c->width + c->gate_at + i, c->dtype);
    narrow(c->output, t * c->num_channels, mixed, c->num_channels, c->dtype, 1.0f);
}

static int recurrence(const struct recurrence *c)
{
    int64_t num_tokens = c->query_starts[c->num_rows], most = smaller(num_tokens, PART_TOKENS);
    int64_t result_size = c->num_heads * c->value_dim;
    float *memory = malloc(sizeof(float) * most * (c->num_channels + FACTORS * c->num_heads + result_size));
    if (memory == NULL)
        return -1;
    struct step_part part = {.end = 0, .mixed = memory};
    part.factors = part.mixed + most * c->num_channels;
    part.results = part.factors + most * FACTORS * c->num_heads;
    while (part.end < num_tokens) {
        part.begin = part.end;
        part.end = smaller(num_tokens, part.begin + PART_TOKENS);
        while (c->query_starts[part.first_row + 1] <= part.begin)
            part.first_row++;
        part.end_row = part.first_row;
        while (part.end_row < c->num_rows && c->query_starts[part.end_row] < part.end)
            part.end_row++;
        convolve(c, &part);
        int64_t work = (part.end - part.begin) * (2 * c->num_channels + 16 * c->num_heads);
        if (c->rule != CONVOLUTION) {
            struct region region = begin_region(work, c->num_threads);
#pragma omp parallel for num_threads(region.num_threads) schedule(static)
            for (int64_t t = part.begin; t < part.end; t++)
                prepare_token(c, &part, t);
            end_region(region);
            recur(c, &part);
        }
        struct region region = begin_region(work, c->num_threads);
#pragma omp parallel for num_threads(region.num_threads) schedule(static)
        for (int64_t t = part.begin; t < part.end; t++)
            if (c->rule == CONVOLUTION)
                finish_convolved(c, &part, t);
            else
                finish_token(c, &part, t);
        end_region(region);
    }
    free(memory);
    return 0;
}
