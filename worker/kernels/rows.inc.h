/* What a model computes row by row between its linear layers: norms and gated activations. */

enum { CHUNK = 256 }; /* entries that are widened at a time; a multiple of LANES */

/* Return `size` entries as floats: where they lie, or as a copy in `widened`. */
static inline const float *floats_at(const void *from, int64_t offset, int64_t size, int64_t dtype, float *widened)
{
    if (dtype == FLOAT32)
        return (const float *)from + offset;
    widen(widened, from, offset, size, dtype);
    return widened;
}

static inline void put(void *to, int64_t at, float number, int64_t dtype)
{
    if (dtype == FLOAT32)
        ((float *)to)[at] = number;
    else
        ((uint16_t *)to)[at] = to_bf16(number);
}

static float sum_of_squares(const void *from, int64_t offset, int64_t size, int64_t dtype)
{
    float widened[CHUNK], total = 0;
    for (int64_t first = 0; first < size; first += CHUNK) {
        int64_t count = smaller(CHUNK, size - first), i = 0;
        const float *chunk = floats_at(from, offset + first, count, dtype, widened);
        vf squares = {0};
        for (; i + LANES <= count; i += LANES)
            squares += load(chunk + i) * load(chunk + i);
        for (; i < count; i++)
            total += chunk[i] * chunk[i];
        total += sum_of_lanes(squares);
    }
    return total;
}

static void norm(const struct norm *c)
{
    struct region region = begin_region(4 * c->num_rows * c->size, c->num_threads);
#pragma omp parallel for num_threads(region.num_threads) schedule(static)
    for (int64_t row = 0; row < c->num_rows; row++) {
        int64_t offset = row * c->size;
        float factor = 1.0f / sqrtf(sum_of_squares(c->input, offset, c->size, c->dtype) / c->size + c->epsilon);
        if (c->dtype == FLOAT32 && !c->adds)
            for (int64_t i = 0; i < c->size; i++)
                ((float *)c->output)[offset + i] = ((const float *)c->input)[offset + i] * factor * c->weights[i];
        else
            for (int64_t i = 0; i < c->size; i++) {
                float normed = item(c->input, offset + i, c->dtype) * factor * c->weights[i];
                put(c->output, offset + i, c->adds ? item(c->output, offset + i, c->dtype) + normed : normed, c->dtype);
            }
    }
    end_region(region);
}

/* SiLU, or GELU with tanh (Hendrycks, Gimpel: Gaussian Error Linear Units, 2016). (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)). */
static inline vf activated(vf x, int64_t activation)
{
    vf u = activation == SILU ? x : splat(1.5957691216f) * (x + splat(0.044715f) * x * x * x);
    return x / (splat(1.0f) + v_exp(-u));
}

/* Compute `count` outputs from gates and values. */
static inline void gate_chunk(float *outputs, const float *gates, const float *values, int64_t count,
                              int64_t activation)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store(outputs + i, activated(load(gates + i), activation) * load(values + i));
    if (i < count) {
        float rest[2][LANES] = {{0}, {0}};
        memcpy(rest[0], gates + i, (count - i) * sizeof(float));
        memcpy(rest[1], values + i, (count - i) * sizeof(float));
        store(rest[0], activated(load(rest[0]), activation) * load(rest[1]));
        memcpy(outputs + i, rest[0], (count - i) * sizeof(float));
    }
}

static void gate(const struct gate *c)
{
    struct region region = begin_region(4 * c->num_rows * c->size, c->num_threads);
#pragma omp parallel for num_threads(region.num_threads) schedule(static)
    for (int64_t row = 0; row < c->num_rows; row++)
        for (int64_t first = 0; first < c->size; first += CHUNK) {
            float gates[CHUNK], values[CHUNK], outputs[CHUNK];
            int64_t count = smaller(CHUNK, c->size - first);
            int64_t from = row * 2 * c->size + first, to = row * c->size + first;
            gate_chunk(outputs, floats_at(c->input, from, count, c->dtype, gates),
                       floats_at(c->input, from + c->size, count, c->dtype, values), count, c->activation);
            narrow(c->output, to, outputs, count, c->dtype, 1.0f);
        }
    end_region(region);
}
