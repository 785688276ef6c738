/* Paged attention: each tile of query vectors runs over its keys and values where they lie in the pool.
 *
 * A tile is some tokens of one row and some key heads: one head for chunks, which reuse what they read, and all heads for
 * decodes if there are enough rows, so that memory is read in its order. G = Hq / Hkv query heads share a key head.
 * The Q query vectors of a tile are ordered by key head, token, and head of the G. The softmax is computed online (Milakov, Gimelshein: Online normalizer calculation for softmax, 2018): a span
 * of keys at a time, with the running maximum and sum of each query vector. A unit's result depends on its own row only.
 */

enum {
    TILE_VECTORS = 32,   /* query vectors of a chunk's tile, about: tokens times G */
    SPAN = 128,          /* keys whose scores are in memory at a time */
    ROWS_PER_THREAD = 4, /* with fewer, the heads of a decode are divided among the threads */
};

struct tile {
    int32_t row, first_token, num_tokens; /* tokens are counted from the row's first one in this step */
    int32_t first_head, num_heads;        /* of the key heads */
};

/* What one thread works with. Vectors are padded with zeros to multiples of LANES. */
struct scratch {
    float *query;   /* [Q, D padded], times the scaling */
    float *scores;  /* [Q, SPAN] */
    float *sums;    /* [Q, Dv padded], not divided yet */
    float *maxima;  /* [Q] */
    float *totals;  /* [Q] */
    float *widened; /* [LANES, D or Dv padded] */
};

static inline int64_t padded(int64_t size)
{
    return (size + LANES - 1) / LANES * LANES;
}

static inline int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t tokens_per_tile(const struct attention *c)
{
    int64_t tokens = TILE_VECTORS / (c->num_heads / c->num_kv_heads);
    return tokens > 1 ? tokens : 1;
}

static int64_t vectors_per_tile(const struct attention *c)
{
    int64_t in_chunk = tokens_per_tile(c) * (c->num_heads / c->num_kv_heads);
    return in_chunk > c->num_heads ? in_chunk : c->num_heads;
}

static int64_t scratch_floats(const struct attention *c)
{
    int64_t vectors = vectors_per_tile(c);
    int64_t dims = padded(c->key_dim) + padded(c->value_dim);
    return padded(vectors * (dims + SPAN + 2)) + LANES * dims;
}

static struct scratch divide_scratch(const struct attention *c, float *memory)
{
    int64_t vectors = vectors_per_tile(c);
    struct scratch s;
    s.query = memory;
    s.scores = s.query + vectors * padded(c->key_dim);
    s.sums = s.scores + vectors * SPAN;
    s.maxima = s.sums + vectors * padded(c->value_dim);
    s.totals = s.maxima + vectors;
    s.widened = s.totals + vectors;
    return s;
}

/* Copy a vector into padded float32. */
static inline void widen(float *to, const void *from, int64_t offset, int64_t dim, int64_t dtype, float factor)
{
    if (dtype == FLOAT32)
        for (int64_t d = 0; d < dim; d++)
            to[d] = ((const float *)from)[offset + d] * factor;
    else
        for (int64_t d = 0; d < dim; d++)
            to[d] = from_bf16(((const uint16_t *)from)[offset + d]) * factor;
    for (int64_t d = dim; d < padded(dim); d++)
        to[d] = 0;
}

/* Copy a vector out of float32. */
static inline void narrow(void *to, int64_t offset, const float *from, int64_t dim, int64_t dtype, float factor)
{
    if (dtype == FLOAT32)
        for (int64_t d = 0; d < dim; d++)
            ((float *)to)[offset + d] = from[d] * factor;
    else
        for (int64_t d = 0; d < dim; d++)
            ((uint16_t *)to)[offset + d] = to_bf16(from[d] * factor);
}

/* Normalize and rotate a query or a key: D elements in float32, padded with zeros. */
static void prepare(const struct attention *c, float *restrict vector, const float *norm, int64_t position)
{
    if (norm) {
        vf squares = {0};
        for (int64_t d = 0; d < c->key_dim; d += LANES)
            squares += load(vector + d) * load(vector + d);
        float factor = 1.0f / sqrtf(sum_of_lanes(squares) / (float)c->key_dim + c->norm_eps);
        for (int64_t d = 0; d < c->key_dim; d++)
            vector[d] = vector[d] * factor * norm[d];
    }
    if (c->cosines) {
        int64_t half = c->rotary_dim / 2;
        const float *cosines = c->cosines + position * half, *sines = c->sines + position * half;
        float *restrict second_half = vector + half;
        for (int64_t d = 0; d < half; d++) {
            float first = vector[d], second = second_half[d];
            vector[d] = first * cosines[d] - second * sines[d];
            second_half[d] = second * cosines[d] + first * sines[d];
        }
    }
}

/* Return the slot of a sequence's position, counted over all blocks. */
static inline int64_t slot_of(const struct attention *c, int64_t row, int64_t position)
{
    int64_t block = c->rows->block_tables[row * c->rows->table_width + position / c->block_size];
    return block * c->block_size + position % c->block_size;
}

/* Return up to LANES vectors of one head from position `begin` on, and their distance. They stay in the pool where they
 * can: float32, a whole number of vectors each, in one block. */
static const float *vectors_at(const struct attention *c, const void *pool, int64_t dim, int64_t row, int64_t kv_head,
                               int64_t begin, int64_t count, float *widened, int64_t *distance)
{
    int64_t slot_size = c->num_kv_heads * dim;
    int is_one_block = begin % c->block_size + count <= c->block_size;
    if (c->pool_dtype == FLOAT32 && dim % LANES == 0 && is_one_block) {
        *distance = slot_size;
        return (const float *)pool + slot_of(c, row, begin) * slot_size + kv_head * dim;
    }
    *distance = padded(dim);
    for (int64_t i = 0; i < count; i++) {
        int64_t offset = slot_of(c, row, begin + i) * slot_size + kv_head * dim;
        widen(widened + i * *distance, pool, offset, dim, c->pool_dtype, 1.0f);
    }
    return widened;
}

/* Return the dot products of a query vector with LANES keys. */
static inline vf dot_products(const float *query, const float *keys, int64_t distance, int64_t dim)
{
    vf sums[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        sums[i] = (vf){0};
    for (int64_t d = 0; d < dim; d += LANES) {
        vf part = load(query + d);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            sums[i] += part * load(keys + i * distance + d);
    }
    return sums_of_lanes(sums);
}

static inline float dot_product(const float *query, const float *key, int64_t dim)
{
    vf sum = {0};
    for (int64_t d = 0; d < dim; d += LANES)
        sum += load(query + d) * load(key + d);
    return sum_of_lanes(sum);
}

static inline void score_group(const float *query, const float *keys, int64_t distance, int64_t dim, int64_t count,
                               float *scores)
{
    if (count == LANES)
        store(scores, dot_products(query, keys, distance, dim));
    else /* slots past the sequence's end may hold anything, or end the pool: do not read them */
        for (int64_t i = 0; i < count; i++)
            scores[i] = dot_product(query, keys + i * distance, dim);
}

/* Fill scores [Q, count] with the products of all query vectors and the keys from position `begin` on. */
static void score_keys(const struct attention *c, const struct scratch *s, const struct tile *tile, int64_t begin,
                       int64_t count)
{
    int64_t dim = padded(c->key_dim), per_head = tile->num_tokens * (c->num_heads / c->num_kv_heads), distance;
    for (int64_t k = 0; k < count; k += LANES) {
        int64_t group = smaller(LANES, count - k);
        for (int64_t head = 0; head < tile->num_heads; head++) {
            const float *keys = vectors_at(c, c->keys, c->key_dim, tile->row, tile->first_head + head, begin + k, group,
                                           s->widened, &distance);
            for (int64_t q = head * per_head; q < (head + 1) * per_head; q++)
                score_group(s->query + q * dim, keys, distance, dim, group, s->scores + q * SPAN + k);
        }
    }
}

/* Turn one query vector's scores into weights, from `first` up to `end`; the others become 0. Scale what it has so far
 * to the new maximum. */
static void weigh(const struct attention *c, const struct scratch *s, int64_t vector, int64_t count, int64_t first,
                  int64_t end)
{
    float *scores = s->scores + vector * SPAN;
    for (int64_t k = 0; k < first; k++)
        scores[k] = -INFINITY;
    for (int64_t k = end; k < padded(count); k++)
        scores[k] = -INFINITY;
    vf largest = splat(s->maxima[vector]);
    for (int64_t k = 0; k < count; k += LANES) {
        vf score = load(scores + k);
        if (c->softcap > 0) {
            vf capped = splat(c->softcap) * v_tanh(score / splat(c->softcap));
            score = pick(score == splat(-INFINITY), score, capped);
            store(scores + k, score);
        }
        largest = larger(score, largest);
    }
    float maximum = largest_lane(largest), before = s->maxima[vector];
    vf total = {0};
    for (int64_t k = 0; k < count; k += LANES) {
        vf score = load(scores + k);
        vf weight = pick(score == splat(-INFINITY), splat(0.0f), v_exp(score - splat(maximum)));
        store(scores + k, weight);
        total += weight;
    }
    s->maxima[vector] = maximum;
    if (before == -INFINITY || maximum == before) { /* the first span with keys, or no new maximum */
        s->totals[vector] += sum_of_lanes(total);
        return;
    }
    float factor = expf(before - maximum), *sums = s->sums + vector * padded(c->value_dim);
    s->totals[vector] = s->totals[vector] * factor + sum_of_lanes(total);
    for (int64_t d = 0; d < padded(c->value_dim); d += LANES)
        store(sums + d, load(sums + d) * splat(factor));
}

/* sums [dim] += weights [count] @ values [count, dim], for COLUMNS * LANES of the dims. */
#define ADD_COLUMNS(columns) \
    do { \
        vf part[columns]; \
        _Pragma("GCC unroll 8") for (int i = 0; i < columns; i++) part[i] = load(sums + d + i * LANES); \
        for (int64_t k = 0; k < count; k++) { \
            vf weight = splat(weights[k]); \
            _Pragma("GCC unroll 8") for (int i = 0; i < columns; i++) \
                part[i] += weight * load(values + k * distance + d + i * LANES); \
        } \
        _Pragma("GCC unroll 8") for (int i = 0; i < columns; i++) store(sums + d + i * LANES, part[i]); \
        d += columns * LANES; \
    } while (0)

static inline void add_weighted(float *sums, const float *weights, const float *values, int64_t distance, int64_t count,
                                int64_t dim)
{
    int64_t d = 0;
    while (d + 8 * LANES <= dim)
        ADD_COLUMNS(8);
    while (d + 4 * LANES <= dim)
        ADD_COLUMNS(4);
    while (d < dim)
        ADD_COLUMNS(1);
}

static void add_values(const struct attention *c, const struct scratch *s, const struct tile *tile, int64_t begin,
                       int64_t count)
{
    int64_t dim = padded(c->value_dim), per_head = tile->num_tokens * (c->num_heads / c->num_kv_heads), distance;
    for (int64_t k = 0; k < count; k += LANES) {
        int64_t group = smaller(LANES, count - k);
        for (int64_t head = 0; head < tile->num_heads; head++) {
            const float *values = vectors_at(c, c->values, c->value_dim, tile->row, tile->first_head + head, begin + k,
                                             group, s->widened, &distance);
            for (int64_t q = head * per_head; q < (head + 1) * per_head; q++)
                add_weighted(s->sums + q * dim, s->scores + q * SPAN + k, values, distance, group, dim);
        }
    }
}

/* Where a query vector comes from: its token among the T, its head among the Hq, and its position. */
struct origin {
    int64_t token, head, position;
};

static inline struct origin origin_of(const struct attention *c, const struct tile *tile, int64_t vector)
{
    int64_t group = c->num_heads / c->num_kv_heads, per_head = tile->num_tokens * group;
    int64_t token = c->rows->query_starts[tile->row] + tile->first_token + vector % per_head / group;
    int64_t position = c->rows->kv_lens[tile->row] - c->rows->query_starts[tile->row + 1] + token;
    return (struct origin){token, (tile->first_head + vector / per_head) * group + vector % group, position};
}

static void read_queries(const struct attention *c, const struct scratch *s, const struct tile *tile,
                         int64_t num_vectors)
{
    for (int64_t q = 0; q < num_vectors; q++) {
        struct origin from = origin_of(c, tile, q);
        int64_t offset = from.head * c->query_head_stride + from.token * c->query_token_stride;
        float *query = s->query + q * padded(c->key_dim);
        widen(query, c->query, offset, c->key_dim, c->dtype, 1.0f);
        prepare(c, query, c->query_norm, from.position);
        for (int64_t d = 0; d < c->key_dim; d++)
            query[d] *= c->scaling;
        s->maxima[q] = -INFINITY;
        s->totals[q] = 0;
    }
    memset(s->sums, 0, sizeof(float) * num_vectors * padded(c->value_dim));
}

static void write_output(const struct attention *c, const struct scratch *s, const struct tile *tile,
                         int64_t num_vectors)
{
    for (int64_t q = 0; q < num_vectors; q++) {
        const float *sums = s->sums + q * padded(c->value_dim);
        float factor = 1.0f / s->totals[q];
        struct origin to = origin_of(c, tile, q);
        int64_t offset = (to.token * c->num_heads + to.head) * c->value_dim;
        narrow(c->output, offset, sums, c->value_dim, c->dtype, factor);
    }
}

/* The keys that the tokens of a tile attend to, for a window of 4:
 *
 *     position        0 1 2 3 4 5 6 7
 *     token at 5          x x x x          begin = 2, the first one's
 *     token at 6            x x x x        end = 7, the last one's
 */
static void attend_tile(const struct attention *c, const struct scratch *s, const struct tile *tile)
{
    int64_t group = c->num_heads / c->num_kv_heads, per_head = tile->num_tokens * group;
    int64_t num_vectors = per_head * tile->num_heads;
    int64_t row_tokens = c->rows->query_starts[tile->row + 1] - c->rows->query_starts[tile->row];
    int64_t position = c->rows->kv_lens[tile->row] - row_tokens + tile->first_token;
    int64_t end = position + tile->num_tokens, begin = 0;
    if (c->window > 0 && position + 1 > c->window)
        begin = position + 1 - c->window;
    if (c->block_size % LANES == 0)
        begin = begin / LANES * LANES; /* no group of keys crosses a block then */
    read_queries(c, s, tile, num_vectors);
    for (int64_t span = begin; span < end; span += SPAN) {
        int64_t count = smaller(SPAN, end - span);
        score_keys(c, s, tile, span, count);
        for (int64_t q = 0; q < num_vectors; q++) {
            int64_t last = position + q % per_head / group, first = c->window > 0 ? last + 1 - c->window : 0;
            int64_t from = first > span ? smaller(first - span, count) : 0;
            int64_t to = last + 1 > span ? smaller(last + 1 - span, count) : 0;
            weigh(c, s, q, count, from, to);
        }
        add_values(c, s, tile, span, count);
    }
    write_output(c, s, tile, num_vectors);
}

static void write_pool(const struct attention *c, const struct scratch *s, const struct tile *tile)
{
    int64_t first = c->rows->query_starts[tile->row] + tile->first_token;
    int64_t first_position = c->rows->kv_lens[tile->row] - c->rows->query_starts[tile->row + 1] + first;
    for (int64_t i = 0; i < tile->num_tokens; i++) {
        int64_t token = first + i, position = first_position + i, slot = slot_of(c, tile->row, position);
        for (int64_t head = tile->first_head; head < tile->first_head + tile->num_heads; head++) {
            int64_t to = slot * c->num_kv_heads + head;
            widen(s->widened, c->key, head * c->key_head_stride + token * c->key_token_stride, c->key_dim, c->dtype, 1.0f);
            prepare(c, s->widened, c->key_norm, position);
            narrow(c->keys, to * c->key_dim, s->widened, c->key_dim, c->pool_dtype, 1.0f);
            widen(s->widened, c->value, head * c->value_head_stride + token * c->value_token_stride, c->value_dim, c->dtype,
                  1.0f);
            narrow(c->values, to * c->value_dim, s->widened, c->value_dim, c->pool_dtype, 1.0f);
        }
    }
}

/* List the tiles, the most expensive ones first as far as that is cheap: chunks before decodes, from their ends. */
static int64_t list_tiles(const struct attention *c, struct tile *tiles)
{
    int64_t count = 0, step = tokens_per_tile(c);
    int64_t decode_heads = c->rows->num_rows >= ROWS_PER_THREAD * c->rows->num_threads ? c->num_kv_heads : 1;
    for (int is_decode = 0; is_decode < 2; is_decode++) {
        int64_t heads = is_decode ? decode_heads : 1;
        for (int64_t row = 0; row < c->rows->num_rows; row++) {
            int64_t num_tokens = c->rows->query_starts[row + 1] - c->rows->query_starts[row];
            if ((num_tokens == 1) != is_decode)
                continue;
            for (int64_t first = (num_tokens - 1) / step * step; first >= 0; first -= step)
                for (int64_t head = 0; head < c->num_kv_heads; head += heads)
                    tiles[count++] = (struct tile){(int32_t)row, (int32_t)first, (int32_t)smaller(step, num_tokens - first),
                                                   (int32_t)head, (int32_t)heads};
        }
    }
    return count;
}

static int attend(const struct attention *c)
{
    struct tile *tiles = malloc(sizeof(struct tile) * c->rows->query_starts[c->rows->num_rows] * c->num_kv_heads);
    size_t scratch_size = (sizeof(float) * scratch_floats(c) + 63) / 64 * 64;
    char *memory = aligned_alloc(64, scratch_size * c->rows->num_threads);
    if (tiles == NULL || memory == NULL) {
        free(tiles);
        free(memory);
        return -1;
    }
    int64_t num_tiles = list_tiles(c, tiles);
#pragma omp parallel num_threads(c->rows->num_threads)
    {
        struct scratch s = divide_scratch(c, (float *)(memory + scratch_size * omp_get_thread_num()));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_tiles; i++)
            write_pool(c, &s, &tiles[i]);
        /* All keys are written here: the loop above ends with a barrier. A tile may read those of other tiles. */
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < num_tiles; i++)
            attend_tile(c, &s, &tiles[i]);
    }
    free(tiles);
    free(memory);
    return 0;
}
