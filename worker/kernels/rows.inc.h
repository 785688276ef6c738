/* What a model computes row by row between its linear layers: norms and gated activations. */

enum { CHUNK = 256 }; /* entries that are widened at a time; a multiple of LANES */

/* Return `size` entries as floats: where they lie, or as a copy in `widened`, padded with zeros to a multiple of LANES. */
static inline const float *floats_at(const void *from, int64_t offset, int64_t size, int64_t dtype, float *widened)
{
    if (dtype == FLOAT32 && size % LANES == 0)
        return (const float *)from + offset;
    widen(widened, from, offset, size, dtype);
    return widened;
}

static float sum_of_squares(const void *from, int64_t offset, int64_t size, int64_t dtype)
{
    float widened[CHUNK], total = 0;
    for (int64_t first = 0; first < size; first += CHUNK) {
        int64_t count = smaller(CHUNK, size - first);
        const float *chunk = floats_at(from, offset + first, count, dtype, widened);
        vf squares = {0};
        for (int64_t i = 0; i < count; i += LANES)
            squares += load(chunk + i) * load(chunk + i);
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

static void gate(const struct gate *c)
{
    struct region region = begin_region(4 * c->num_rows * c->size, c->num_threads);
#pragma omp parallel for num_threads(region.num_threads) schedule(static)
    for (int64_t row = 0; row < c->num_rows; row++)
        for (int64_t first = 0; first < c->size; first += CHUNK) {
            float gates[CHUNK], values[CHUNK], outputs[CHUNK];
            int64_t count = smaller(CHUNK, c->size - first);
            int64_t from = row * 2 * c->size + first, to = row * c->size + first;
            const float *gate = floats_at(c->input, from, count, c->dtype, gates);
            const float *value = floats_at(c->input, from + c->size, count, c->dtype, values);
            for (int64_t i = 0; i < count; i += LANES)
                store(outputs + i, activated(load(gate + i), c->activation) * load(value + i));
            narrow(c->output, to, outputs, count, c->dtype, 1.0f);
        }
    end_region(region);
}
