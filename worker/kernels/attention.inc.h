/* Paged attention: each tile of query vectors runs over its keys and values where they lie in the pool.
 *
 * A tile is some tokens of one row, or some rows of one token each whose keys begin alike, and some key heads: one head for
 * chunks, which reuse what they read, and all heads for decodes if there are enough rows, so that memory is read in its
 * order. G = Hq / Hkv query heads share a key head. The Q query vectors of a tile are ordered by key head, member (token or
 * row), and head of the G. The softmax is computed online (Milakov, Gimelshein: Online normalizer calculation for softmax,
 * 2018): a span of keys at a time, with the running maximum and sum of each query vector.
 *
 * The few query vectors of a decode lie in rows: a register holds entries of one vector. More vectors of a head lie in
 * lanes: a register holds the same entry of LANES vectors, so nothing is added across a register.
 *
 * Spans begin at multiples of SPAN, and each sum has one order in all tiles. So a token's result has the same bits whatever
 * the other rows are, whatever rows it shares keys with, and however its sequence was divided into chunks. (For blocks
 * that are no multiple of LANES, a sliding window may change the order.)
 */

enum {
    TILE_VECTORS = 32,   /* query vectors of a chunk's tile, about: tokens times G */
    TILE_ROWS_MAX = 16,  /* rows of a tile that have keys in common */
    SPAN = 128,          /* keys whose scores are in memory at a time */
    ROWS_PER_THREAD = 4, /* with fewer, the heads of a decode are divided among the threads */
    ROW_VECTORS = 8,     /* more query vectors of a head are computed side by side, in lanes */
    LANE_KEYS = 4, LANE_COLUMNS = 2, /* keys and registers of vectors in lanes whose scores are computed together */
};

struct tile {
    int32_t first_row, num_rows;     /* in the order of the rows; several only if they have one token each */
    int32_t first_token, num_tokens; /* tokens are counted from the row's first one in this step */
    int32_t first_head, num_heads;   /* of the key heads */
    int32_t common;                  /* positions from 0 on that have the same slots in all rows */
};

/* The members and heads of a tile that attend to the same slots together, and the positions of these. */
struct part {
    int64_t row, first_member, num_members;
    int64_t first_head, num_heads; /* of those of the tile. One, if the query vectors are in lanes */
    int64_t begin, count, end;     /* end: of all positions to come */
};

/* What one thread works with. Vectors are padded with zeros to multiples of LANES. */
struct scratch {
    float *query;   /* [Q, D padded], times the scaling */
    float *scores;  /* [Q, SPAN], or of one head [SPAN, Q padded] if the query vectors are in lanes */
    float *turned;  /* [Q padded / LANES, D padded, LANES]: query vectors of one head in lanes */
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

static int64_t num_vectors(const struct attention *c, const struct tile *tile)
{
    return (int64_t)tile->num_rows * tile->num_tokens * tile->num_heads * (c->num_heads / c->num_kv_heads);
}

static int64_t scratch_floats(const struct attention *c, int64_t vectors)
{
    int64_t dims = padded(c->key_dim) + padded(c->value_dim);
    return padded(vectors * (dims + 2)) + (vectors + LANES) * (SPAN + padded(c->key_dim)) + LANES * dims;
}

static struct scratch divide_scratch(const struct attention *c, int64_t vectors, float *memory)
{
    struct scratch s;
    s.query = memory;
    s.scores = s.query + vectors * padded(c->key_dim);
    s.turned = s.scores + (vectors + LANES) * SPAN;
    s.sums = s.turned + (vectors + LANES) * padded(c->key_dim);
    s.maxima = s.sums + vectors * padded(c->value_dim);
    s.totals = s.maxima + vectors;
    s.widened = s.totals + vectors;
    return s;
}

/* Copy a vector into padded float32. */
static inline void widen(float *to, const void *from, int64_t offset, int64_t dim, int64_t dtype)
{
    for (int64_t d = 0; d < dim; d++)
        to[d] = item(from, offset + d, dtype);
    for (int64_t d = dim; d < padded(dim); d++)
        to[d] = 0;
}

/* Copy a vector out of float32. */
static inline void narrow(void *to, int64_t offset, const float *from, int64_t dim, int64_t dtype, float factor)
{
    for (int64_t d = 0; d < dim; d++)
        put(to, offset + d, from[d] * factor, dtype);
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

static inline int64_t row_of(const struct attention *c, const struct tile *tile, int64_t member)
{
    return c->rows->order[tile->first_row + (tile->num_rows > 1 ? member : 0)];
}

/* Return the slot of a sequence's position, counted over all blocks. A division of 64 bits takes twice as long. */
static inline int64_t slot_of(const struct attention *c, int64_t row, int64_t position)
{
    uint32_t size = (uint32_t)c->block_size, number = (uint32_t)position / size;
    int64_t block = c->rows->block_tables[row * c->rows->table_width + number];
    return block * size + ((uint32_t)position - number * size);
}

/* The key or value vectors of one head at up to LANES positions. */
struct vectors {
    const void *first;
    int64_t distance; /* in elements */
    int64_t dtype;
};

/* Return the vectors at `count` positions from `begin` on. They stay in the pool where they can: in one block, a whole
 * number of vector registers each, and to be widened for few query vectors only. Scores are computed for LANES keys, so fewer
 * ones are copied and followed by zeros: slots past the sequence's end may hold anything, or end the pool. */
static inline struct vectors vectors_at(const struct attention *c, const void *pool, int64_t dim, const struct part *part,
                                        int64_t kv_head, int64_t begin, int64_t count, int64_t needed, float *widened)
{
    int64_t slot_size = c->num_kv_heads * dim, item_size = c->pool_dtype == FLOAT32 ? 4 : 2;
    int64_t queries = part->num_members * (c->num_heads / c->num_kv_heads);
    int is_one_block = (uint32_t)begin % (uint32_t)c->block_size + count <= c->block_size;
    if (is_one_block && count >= needed && dim % LANES == 0 && (c->pool_dtype == FLOAT32 || queries <= ROW_VECTORS)) {
        int64_t offset = slot_of(c, part->row, begin) * slot_size + kv_head * dim;
        return (struct vectors){(const char *)pool + offset * item_size, slot_size, c->pool_dtype};
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t offset = slot_of(c, part->row, begin + i) * slot_size + kv_head * dim;
        widen(widened + i * padded(dim), pool, offset, dim, c->pool_dtype);
    }
    if (count < needed)
        memset(widened + count * padded(dim), 0, sizeof(float) * (needed - count) * padded(dim));
    return (struct vectors){widened, padded(dim), FLOAT32};
}

/* Return LANES vectors to prefetch, from a position on; none behind the part's end. They are those of the head, or, if the
 * part has all heads, the head's share of the vectors of all, in the order of the memory, which the hardware's prefetcher
 * recognizes. What is behind the end of a block is prefetched in vain. */
static inline struct vectors vectors_ahead(const struct attention *c, const void *pool, int64_t dim, const struct part *part,
                                           int64_t kv_head, int64_t begin)
{
    int64_t slot_size = c->num_kv_heads * dim, item_size = c->pool_dtype == FLOAT32 ? 4 : 2;
    int is_share = part->num_heads == c->num_kv_heads;
    if (begin >= part->end)
        return (struct vectors){NULL, 0, c->pool_dtype};
    int64_t offset = slot_of(c, part->row, begin) * slot_size + kv_head * dim * (is_share ? LANES : 1);
    return (struct vectors){(const char *)pool + offset * item_size, is_share ? dim : slot_size, c->pool_dtype};
}

/* Prefetch a part of a vector. GCC removes calls of functions that only prefetch, for they seem to have no effect. So they
 * are always inlined. */
static ALWAYS_INLINE void prefetch(struct vectors vectors, int64_t index, int64_t first, int64_t count, const int64_t dtype)
{
    const int64_t size = dtype == FLOAT32 ? 4 : 2;
    const char *from = (const char *)vectors.first + (index * vectors.distance + first) * size;
    for (int64_t byte = 0; byte < count * size; byte += 64)
        __builtin_prefetch(from + byte, 0, 2);
}

/* Prefetch LANES vectors now, and leave none, unless it is done beside the arithmetic. */
static ALWAYS_INLINE void prefetch_unless(int is_beside, struct vectors *next, int64_t dim)
{
    if (is_beside)
        return;
    for (int64_t i = 0; next->first && i < LANES; i++)
        if (next->dtype == FLOAT32)
            prefetch(*next, i, 0, dim, FLOAT32);
        else
            prefetch(*next, i, 0, dim, BFLOAT16);
    next->first = NULL;
}

static ALWAYS_INLINE vf load_item(const void *from, int64_t offset, const int64_t dtype)
{
    return dtype == FLOAT32 ? load((const float *)from + offset) : load_bf16((const uint16_t *)from + offset);
}

/* Fill scores [num_queries, LANES] with the dot products of queries and LANES keys. Meanwhile prefetch as many vectors of
 * `next`, if there are any: all at once they would wait for each other, and the arithmetic behind them. */
static ALWAYS_INLINE void score_tile(const float *queries, struct vectors keys, int64_t dim, const int num_queries,
                                     const int64_t dtype, struct vectors next, float *scores)
{
    const int num_keys = LANES / num_queries;
    int64_t num_ahead = 0, due = 0; /* vectors that are prefetched, and entries that are due */
    for (int first = 0; first < LANES; first += num_keys) {
        vf sums[LANES];
        UNROLLED for (int i = 0; i < LANES; i++)
            sums[i] = (vf){0};
        for (int64_t d = 0; d < dim; d += LANES) {
            for (due += next.first ? num_keys * LANES : 0; due >= dim; due -= dim)
                prefetch(next, num_ahead++, 0, dim, dtype);
            vf parts[4];
            UNROLLED for (int q = 0; q < num_queries; q++)
                parts[q] = load(queries + q * dim + d);
            UNROLLED for (int i = 0; i < num_keys; i++) {
                vf key = load_item(keys.first, (first + i) * keys.distance + d, dtype);
                UNROLLED for (int q = 0; q < num_queries; q++)
                    sums[q * num_keys + i] += parts[q] * key;
            }
        }
        float totals[LANES];
        store(totals, sums_of_lanes(sums));
        UNROLLED for (int q = 0; q < num_queries; q++)
            memcpy(scores + q * SPAN + first, totals + q * num_keys, num_keys * sizeof(float));
    }
}

static ALWAYS_INLINE void score_vectors(const float *queries, int64_t count, struct vectors keys, int64_t dim,
                                        const int64_t dtype, struct vectors next, float *scores)
{
    int64_t q = 0;
    for (; q + 4 <= count; q += 4, next.first = NULL)
        score_tile(queries + q * dim, keys, dim, 4, dtype, next, scores + q * SPAN);
    for (; q + 2 <= count; q += 2, next.first = NULL)
        score_tile(queries + q * dim, keys, dim, 2, dtype, next, scores + q * SPAN);
    if (q < count)
        score_tile(queries + q * dim, keys, dim, 1, dtype, next, scores + q * SPAN);
}

/* Bring the query vectors [count, dim] of a head into lanes: turned [count / LANES, dim, LANES], padded with zeros. */
static void turn_queries(const float *queries, int64_t count, int64_t dim, float *turned)
{
    for (int64_t q = 0; q < padded(count); q++)
        for (int64_t d = 0; d < dim; d++)
            turned[(q / LANES * dim + d) * LANES + q % LANES] = q < count ? queries[q * dim + d] : 0;
}

/* Fill `columns` times LANES of the scores [LANE_KEYS, width]: the dot products of keys and query vectors in lanes. The order
 * of the sums is that of score_tile: one for each of the LANES entries of a vector, which are then added in pairs, the most
 * distant ones first. With the entries in the order of their reversed bits few sums wait for their partner. */
static ALWAYS_INLINE void score_columns(const float *turned, const float *keys, int64_t distance, int64_t dim,
                                        int64_t width, const int columns, float *scores)
{
    vf sums[5][LANE_COLUMNS * LANE_KEYS]; /* of 1, 2, 4, 8 and 16 entries */
    int level = 0;
    UNROLLED for (int i = 0; i < LANES; i++) {
        vf own[LANE_COLUMNS * LANE_KEYS] = {0};
        for (int64_t d = (i & 1) * LANES / 2 + (i & 2) * LANES / 8 + (i & 4) * LANES / 32 + (i & 8) * LANES / 128;
             d < dim; d += LANES)
            UNROLLED for (int j = 0; j < columns * LANE_KEYS; j++)
                own[j] += load(turned + (j / LANE_KEYS * dim + d) * LANES) * splat(keys[j % LANE_KEYS * distance + d]);
        UNROLLED for (level = 0; i >> level & 1; level++)
            UNROLLED for (int j = 0; j < columns * LANE_KEYS; j++)
                own[j] = sums[level][j] + own[j];
        memcpy(sums[level], own, sizeof own);
    }
    UNROLLED for (int j = 0; j < columns * LANE_KEYS; j++)
        store(scores + j % LANE_KEYS * width + j / LANE_KEYS * LANES, sums[level][j]);
}

static inline void score_lanes(const float *turned, const float *keys, int64_t distance, int64_t dim, int64_t width,
                               float *scores)
{
    for (int64_t v = 0; v < width; v += LANE_COLUMNS * LANES)
        if (v + LANES < width)
            score_columns(turned + v * dim, keys, distance, dim, width, LANE_COLUMNS, scores + v);
        else
            score_columns(turned + v * dim, keys, distance, dim, width, 1, scores + v);
}

/* While the rows of a tile attend to their common positions, which is bound by arithmetic, prefetch a share of what each
 * row has of its own, which is bound by memory. A step is LANE_KEYS common keys of a head. */
static ALWAYS_INLINE void prefetch_own(const struct attention *c, const struct tile *tile, int64_t head, int64_t position)
{
    int64_t steps_per_row = tile->num_heads * tile->common / (tile->num_rows * LANE_KEYS);
    int64_t step = (head * tile->common + position) / LANE_KEYS, member = step / steps_per_row;
    if (member >= tile->num_rows || tile->num_heads < c->num_kv_heads)
        return;
    int64_t row = row_of(c, tile, member), item_size = c->pool_dtype == FLOAT32 ? 4 : 2;
    int64_t key_size = c->num_kv_heads * c->key_dim * item_size, value_size = c->num_kv_heads * c->value_dim * item_size;
    int64_t count = smaller(c->rows->kv_lens[row] - tile->common, tile->common / 8); /* what memory delivers meanwhile */
    int64_t from = count * (step % steps_per_row) / steps_per_row, to = count * (step % steps_per_row + 1) / steps_per_row;
    for (int64_t i = from; i < to; i++) {
        int64_t slot = slot_of(c, row, tile->common + i);
        for (int64_t byte = 0; byte < key_size; byte += 64)
            __builtin_prefetch((const char *)c->keys + slot * key_size + byte, 0, 2);
        for (int64_t byte = 0; byte < value_size; byte += 64)
            __builtin_prefetch((const char *)c->values + slot * value_size + byte, 0, 2);
    }
}

/* Fill the scores with the products of the part's query vectors and keys. */
static void score_keys(const struct attention *c, const struct scratch *s, const struct tile *tile,
                       const struct part *part)
{
    int64_t group = c->num_heads / c->num_kv_heads, per_head = (int64_t)tile->num_rows * tile->num_tokens * group;
    int64_t dim = padded(c->key_dim), queries = part->num_members * group;
    for (int64_t k = 0; k < part->count; k += LANES)
        for (int64_t head = part->first_head; head < part->first_head + part->num_heads; head++) {
            int64_t kv_head = tile->first_head + head, q = head * per_head + part->first_member * group;
            int64_t begin = part->begin + k, count = smaller(LANES, part->count - k);
            struct vectors keys = vectors_at(c, c->keys, c->key_dim, part, kv_head, begin, count, LANES, s->widened);
            struct vectors next = k + LANES < part->count
                                      ? vectors_ahead(c, c->keys, c->key_dim, part, kv_head, begin + LANES)
                                      : vectors_ahead(c, c->values, c->value_dim, part, kv_head, part->begin);
            prefetch_unless(queries <= ROW_VECTORS && keys.dtype == next.dtype, &next, dim);
            if (queries > ROW_VECTORS)
                for (int64_t key = 0; key < count; key += LANE_KEYS) {
                    if (tile->num_rows > 1 && part->num_members > 1)
                        prefetch_own(c, tile, head, begin + key);
                    score_lanes(s->turned, (const float *)keys.first + key * keys.distance, keys.distance, dim,
                                padded(queries), s->scores + (k + key) * padded(queries));
                }
            else if (keys.dtype == FLOAT32)
                score_vectors(s->query + q * dim, queries, keys, dim, FLOAT32, next, s->scores + q * SPAN + k);
            else
                score_vectors(s->query + q * dim, queries, keys, dim, BFLOAT16, next, s->scores + q * SPAN + k);
        }
}

/* Cap scores, and find out which keys a query vector does not see. */
static inline vf mask(const struct attention *c, vf scores, vi is_seen)
{
    if (c->softcap > 0)
        scores = splat(c->softcap) * v_tanh(scores / splat(c->softcap));
    return pick(is_seen, scores, splat(-INFINITY));
}

static inline vf weight_of(vf score, vf maximum)
{
    return pick(score == splat(-INFINITY), splat(0.0f), v_exp(score - maximum));
}

/* Scale what a query vector has so far to the new maximum. */
static inline void scale_sums(const struct attention *c, float *sums, float factor)
{
    if (factor != 1)
        for (int64_t d = 0; d < padded(c->value_dim); d += LANES)
            store(sums + d, load(sums + d) * splat(factor));
}

/* Turn the scores of a query vector in a row into weights. It sees the keys from `first` up to `end`; the others' weights
 * become 0. */
static void weigh_row(const struct attention *c, const struct scratch *s, int64_t vector, int64_t count, int32_t first,
                      int32_t end)
{
    float *scores = s->scores + vector * SPAN;
    vf largest = splat(s->maxima[vector]), total = {0};
    vi keys = first_ints();
    for (int64_t k = 0; k < count; k += LANES, keys += LANES) {
        vf score = mask(c, load(scores + k), (keys >= first) & (keys < end));
        store(scores + k, score);
        largest = larger(score, largest);
    }
    float maximum = largest_lane(largest), before = s->maxima[vector];
    for (int64_t k = 0; k < count; k += LANES) {
        vf weight = weight_of(load(scores + k), splat(maximum));
        store(scores + k, weight);
        total += weight;
    }
    float factor = maximum == before ? 1 : v_exp(splat(before - maximum))[0];
    s->maxima[vector] = maximum;
    s->totals[vector] = s->totals[vector] * factor + sum_of_lanes(total);
    scale_sums(c, s->sums + vector * padded(c->value_dim), factor);
}

/* The same for LANES query vectors in lanes, of which `num_vectors` exist. Lane by lane it is the same arithmetic. */
static void weigh_lanes(const struct attention *c, const struct scratch *s, int64_t vector, int64_t num_vectors,
                        float *scores, int64_t width, int64_t count, vi first, vi end)
{
    vf before = splat(-INFINITY), totals = {0}, sums[LANES] = {{0}}, sum = {0};
    memcpy(&before, s->maxima + vector, num_vectors * sizeof(float));
    memcpy(&totals, s->totals + vector, num_vectors * sizeof(float));
    vf maximum = before;
    for (int64_t k = 0; k < count; k++) {
        vf score = mask(c, load(scores + k * width), (first <= (int32_t)k) & (end > (int32_t)k));
        store(scores + k * width, score);
        maximum = larger(score, maximum);
    }
    for (int64_t k = 0; k < count; k++) {
        vf weight = weight_of(load(scores + k * width), maximum);
        store(scores + k * width, weight);
        sums[k % LANES] += weight;
    }
    for (int i = 0; i < LANES; i++)
        sum += sums[i];
    vf factor = pick(maximum == before, splat(1.0f), v_exp(before - maximum));
    totals = totals * factor + sum;
    memcpy(s->maxima + vector, &maximum, num_vectors * sizeof(float));
    memcpy(s->totals + vector, &totals, num_vectors * sizeof(float));
    for (int64_t i = 0; i < num_vectors; i++)
        scale_sums(c, s->sums + (vector + i) * padded(c->value_dim), factor[i]);
}

/* The weights of query vectors in rows [Q, SPAN] or in lanes [SPAN, Q padded]. */
struct weights {
    const float *first;
    int64_t query_stride, key_stride;
};

/* sums [num_queries, columns] += weights [num_queries, count] @ values [count, columns], in columns of LANES. `next`: as for
 * score_tile. */
static ALWAYS_INLINE void add_columns(float *sums, struct weights weights, struct vectors values, int64_t column,
                                      int64_t count, int64_t dim, const int num_queries, const int columns,
                                      const int64_t dtype, struct vectors next)
{
    vf parts[16];
    UNROLLED for (int i = 0; i < num_queries * columns; i++)
        parts[i] = load(sums + i / columns * dim + column + i % columns * LANES);
    for (int64_t k = 0; k < count; k++) {
        if (next.first)
            prefetch(next, k, column, columns * LANES, dtype);
        vf factors[4];
        UNROLLED for (int q = 0; q < num_queries; q++)
            factors[q] = splat(weights.first[q * weights.query_stride + k * weights.key_stride]);
        UNROLLED for (int i = 0; i < columns; i++) {
            vf value = load_item(values.first, k * values.distance + column + i * LANES, dtype);
            UNROLLED for (int q = 0; q < num_queries; q++)
                parts[q * columns + i] += factors[q] * value;
        }
    }
    UNROLLED for (int i = 0; i < num_queries * columns; i++)
        store(sums + i / columns * dim + column + i % columns * LANES, parts[i]);
}

static ALWAYS_INLINE void add_tile_values(float *sums, struct weights weights, struct vectors values, int64_t count,
                                          int64_t dim, const int num_queries, const int64_t dtype, struct vectors next)
{
    const int wide = smaller(8, (LANES == 16 ? 16 : 8) / num_queries); /* what the registers hold */
    int64_t column = 0;
    for (; column + wide * LANES <= dim; column += wide * LANES)
        add_columns(sums, weights, values, column, count, dim, num_queries, wide, dtype, next);
    for (; column + wide / 2 * LANES <= dim; column += wide / 2 * LANES)
        add_columns(sums, weights, values, column, count, dim, num_queries, wide / 2, dtype, next);
    for (; column < dim; column += LANES)
        add_columns(sums, weights, values, column, count, dim, num_queries, 1, dtype, next);
}

static ALWAYS_INLINE void add_vectors(float *sums, struct weights weights, int64_t num_queries, struct vectors values,
                                      int64_t count, int64_t dim, const int64_t dtype, struct vectors next)
{
    int64_t q = 0;
    for (; q + 4 <= num_queries; q += 4, weights.first += 4 * weights.query_stride, next.first = NULL)
        add_tile_values(sums + q * dim, weights, values, count, dim, 4, dtype, next);
    for (; q + 2 <= num_queries; q += 2, weights.first += 2 * weights.query_stride, next.first = NULL)
        add_tile_values(sums + q * dim, weights, values, count, dim, 2, dtype, next);
    if (q < num_queries)
        add_tile_values(sums + q * dim, weights, values, count, dim, 1, dtype, next);
}

static void add_values(const struct attention *c, const struct scratch *s, const struct tile *tile,
                       const struct part *part)
{
    int64_t group = c->num_heads / c->num_kv_heads, per_head = (int64_t)tile->num_rows * tile->num_tokens * group;
    int64_t dim = padded(c->value_dim), num_queries = part->num_members * group;
    for (int64_t k = 0; k < part->count; k += LANES)
        for (int64_t head = part->first_head; head < part->first_head + part->num_heads; head++) {
            int64_t kv_head = tile->first_head + head, q = head * per_head + part->first_member * group;
            int64_t begin = part->begin + k, count = smaller(LANES, part->count - k);
            struct vectors values = vectors_at(c, c->values, c->value_dim, part, kv_head, begin, count, 0, s->widened);
            struct vectors next = k + LANES < part->count
                                      ? vectors_ahead(c, c->values, c->value_dim, part, kv_head, begin + LANES)
                                      : vectors_ahead(c, c->keys, c->key_dim, part, kv_head, begin + count);
            float *sums = s->sums + q * dim;
            struct weights in_rows = {s->scores + q * SPAN + k, SPAN, 1};
            struct weights in_lanes = {s->scores + k * padded(num_queries), 1, padded(num_queries)};
            prefetch_unless(num_queries <= ROW_VECTORS && values.dtype == next.dtype, &next, dim);
            if (num_queries > ROW_VECTORS)
                add_vectors(sums, in_lanes, num_queries, values, count, dim, FLOAT32, next);
            else if (values.dtype == FLOAT32)
                add_vectors(sums, in_rows, num_queries, values, count, dim, FLOAT32, next);
            else
                add_vectors(sums, in_rows, num_queries, values, count, dim, BFLOAT16, next);
        }
}

/* Where a member or a query vector comes from: its token among the T, its position, and its head among the Hq. */
struct origin { int64_t token, position, head; };

static inline struct origin origin_of_member(const struct attention *c, const struct tile *tile, int64_t member)
{
    int64_t row = row_of(c, tile, member);
    int64_t token = c->rows->query_starts[row] + tile->first_token + (tile->num_rows > 1 ? 0 : member);
    return (struct origin){token, c->rows->kv_lens[row] - c->rows->query_starts[row + 1] + token, 0};
}

static inline struct origin origin_of(const struct attention *c, const struct tile *tile, int64_t vector)
{
    int64_t group = c->num_heads / c->num_kv_heads, per_head = (int64_t)tile->num_rows * tile->num_tokens * group;
    struct origin origin = origin_of_member(c, tile, vector % per_head / group);
    origin.head = (tile->first_head + vector / per_head) * group + vector % group;
    return origin;
}

static void read_queries(const struct attention *c, const struct scratch *s, const struct tile *tile)
{
    int64_t count = num_vectors(c, tile);
    for (int64_t q = 0; q < count; q++) {
        struct origin from = origin_of(c, tile, q);
        int64_t offset = from.head * c->query_head_stride + from.token * c->query_token_stride;
        float *query = s->query + q * padded(c->key_dim);
        widen(query, c->query, offset, c->key_dim, c->dtype);
        prepare(c, query, c->query_norm, from.position);
        for (int64_t d = 0; d < c->key_dim; d++)
            query[d] *= c->scaling;
        s->maxima[q] = -INFINITY;
        s->totals[q] = 0;
    }
    memset(s->sums, 0, sizeof(float) * count * padded(c->value_dim));
}

static void write_output(const struct attention *c, const struct scratch *s, const struct tile *tile)
{
    int64_t count = num_vectors(c, tile);
    for (int64_t q = 0; q < count; q++) {
        const float *sums = s->sums + q * padded(c->value_dim);
        float factor = 1.0f / s->totals[q];
        struct origin to = origin_of(c, tile, q);
        int64_t offset = (to.token * c->num_heads + to.head) * c->value_dim;
        narrow(c->output, offset, sums, c->value_dim, c->dtype, factor);
    }
}

/* The keys of a span that a member sees, counted from the first one. */
struct range { int32_t first, end; };

static inline struct range seen_by(const struct attention *c, const struct tile *tile, const struct part *part,
                                   int64_t member)
{
    int64_t end = origin_of_member(c, tile, member).position + 1, first = c->window > 0 ? end - c->window : 0;
    return (struct range){(int32_t)(first > part->begin ? smaller(first - part->begin, part->count) : 0),
                          (int32_t)(end > part->begin ? smaller(end - part->begin, part->count) : 0)};
}

/* Turn the scores of a part into weights. */
static void weigh(const struct attention *c, const struct scratch *s, const struct tile *tile, const struct part *part)
{
    int64_t group = c->num_heads / c->num_kv_heads, members = (int64_t)tile->num_rows * tile->num_tokens;
    int64_t first_vector = (part->first_head * members + part->first_member) * group, queries = part->num_members * group;
    if (queries <= ROW_VECTORS) {
        for (int64_t i = 0; i < part->num_members; i++) {
            struct range range = seen_by(c, tile, part, part->first_member + i);
            for (int64_t head = 0; head < part->num_heads; head++)
                for (int64_t g = 0; g < group; g++)
                    weigh_row(c, s, first_vector + (head * members + i) * group + g, part->count, range.first, range.end);
        }
        return;
    }
    for (int64_t q = 0; q < queries; q += LANES) {
        vi first = {0}, end = {0};
        int64_t count = smaller(LANES, queries - q);
        for (int64_t i = 0; i < count; i++) {
            struct range range = seen_by(c, tile, part, part->first_member + (q + i) / group);
            first[i] = range.first;
            end[i] = range.end;
        }
        weigh_lanes(c, s, first_vector + q, count, s->scores + q, padded(queries), part->count, first, end);
    }
}

/* Attend to positions [begin, end), span by span, with some members of a tile. */
static void attend_part(const struct attention *c, const struct scratch *s, const struct tile *tile, int64_t row,
                        int64_t first_member, int64_t num_members, int64_t begin, int64_t end)
{
    int64_t group = c->num_heads / c->num_kv_heads, per_head = (int64_t)tile->num_rows * tile->num_tokens * group;
    int64_t dim = padded(c->key_dim), num_heads = num_members * group > ROW_VECTORS ? 1 : tile->num_heads;
    for (int64_t head = 0; head < tile->num_heads; head += num_heads) {
        struct part part = {row, first_member, num_members, head, num_heads, begin, 0, end};
        if (num_members * group > ROW_VECTORS)
            turn_queries(s->query + (head * per_head + first_member * group) * dim, num_members * group, dim, s->turned);
        for (; part.begin < end; part.begin += part.count) {
            part.count = smaller(SPAN - part.begin % SPAN, end - part.begin);
            score_keys(c, s, tile, &part);
            weigh(c, s, tile, &part);
            add_values(c, s, tile, &part);
        }
    }
}

/* The keys that the tokens of a tile attend to, for a window of 4:
 *
 *     position        0 1 2 3 4 5 6 7
 *     token at 5          x x x x          begin = 2, the first one's
 *     token at 6            x x x x        end = 7, the last one's
 *
 * Rows with common positions attend to these together, then each to its own.
 */
static void attend_tile(const struct attention *c, const struct scratch *s, const struct tile *tile)
{
    read_queries(c, s, tile);
    if (tile->num_rows > 1)
        attend_part(c, s, tile, row_of(c, tile, 0), 0, tile->num_rows, 0, tile->common);
    for (int64_t i = 0; i < tile->num_rows; i++) {
        int64_t position = origin_of_member(c, tile, i).position, begin = tile->common;
        if (c->window > 0 && position + 1 - c->window > begin)
            begin = position + 1 - c->window;
        if (c->block_size % LANES == 0)
            begin = begin / LANES * LANES; /* no group of keys crosses a block then */
        attend_part(c, s, tile, row_of(c, tile, i), i, tile->num_tokens, begin, position + tile->num_tokens);
    }
    write_output(c, s, tile);
}

static void write_pool(const struct attention *c, const struct scratch *s, const struct tile *tile)
{
    for (int64_t i = 0; i < tile->num_rows * tile->num_tokens; i++) {
        struct origin from = origin_of_member(c, tile, i);
        int64_t slot = slot_of(c, row_of(c, tile, i), from.position), token = from.token;
        for (int64_t head = tile->first_head; head < tile->first_head + tile->num_heads; head++) {
            int64_t to = slot * c->num_kv_heads + head;
            widen(s->widened, c->key, head * c->key_head_stride + token * c->key_token_stride, c->key_dim, c->dtype);
            prepare(c, s->widened, c->key_norm, from.position);
            narrow(c->keys, to * c->key_dim, s->widened, c->key_dim, c->pool_dtype, 1.0f);
            widen(s->widened, c->value, head * c->value_head_stride + token * c->value_token_stride, c->value_dim, c->dtype);
            narrow(c->values, to * c->value_dim, s->widened, c->value_dim, c->pool_dtype, 1.0f);
        }
    }
}

/* Return how many rows, from one in the order on, attend together to the `common` positions that they have in common. With
 * a window that ends before the last position they do not. */
static int64_t rows_together(const struct attention *c, int64_t first, int32_t *common)
{
    const struct attention_rows *rows = c->rows;
    int64_t count = 1, most = 1 + rows->num_decodes / (ROWS_PER_THREAD * rows->num_threads);
    most = smaller(TILE_ROWS_MAX, most > ROW_VECTORS ? padded(most) : most); /* no lanes without a row */
    *common = 0;
    while (count < most && first + count < rows->num_decodes) {
        int64_t shared = rows->common[first + count - 1] / SPAN * SPAN;
        int32_t longer = rows->kv_lens[rows->order[first + count - 1]], other = rows->kv_lens[rows->order[first + count]];
        int is_outside = c->window > 0 && (longer > c->window || other > c->window);
        if (shared == 0 || is_outside || (count > 1 && 2 * shared < *common))
            break;
        *common = (int32_t)(count > 1 ? smaller(*common, shared) : shared);
        count++;
    }
    return count;
}

/* List the tiles, about the most expensive ones first: chunks from their ends, then decodes. Return their number. */
static int64_t list_tiles(const struct attention *c, struct tile *tiles)
{
    const struct attention_rows *rows = c->rows;
    int64_t count = 0, group = c->num_heads / c->num_kv_heads, step = group < TILE_VECTORS ? TILE_VECTORS / group : 1;
    int64_t heads = rows->num_rows >= ROWS_PER_THREAD * rows->num_threads ? c->num_kv_heads : 1;
    for (int64_t i = rows->num_decodes; i < rows->num_rows; i++) {
        int64_t num_tokens = rows->query_starts[rows->order[i] + 1] - rows->query_starts[rows->order[i]];
        for (int64_t first = (num_tokens - 1) / step * step; first >= 0; first -= step)
            for (int64_t head = 0; head < c->num_kv_heads; head++)
                tiles[count++] = (struct tile){(int32_t)i,    1, (int32_t)first, (int32_t)smaller(step, num_tokens - first),
                                               (int32_t)head, 1, 0};
    }
    for (int64_t i = 0; i < rows->num_decodes;) {
        int32_t common, together = (int32_t)rows_together(c, i, &common);
        for (int64_t head = 0; head < c->num_kv_heads; head += heads)
            tiles[count++] = (struct tile){(int32_t)i, together, 0, 1, (int32_t)head, (int32_t)heads, common};
        i += together;
    }
    return count;
}

static int attend(const struct attention *c)
{
    struct tile *tiles = malloc(sizeof(struct tile) * c->rows->query_starts[c->rows->num_rows] * c->num_kv_heads);
    if (tiles == NULL)
        return -1;
    int64_t num_tiles = list_tiles(c, tiles), vectors = 0, products = 0;
    for (int64_t i = 0; i < num_tiles; i++)
        vectors = num_vectors(c, &tiles[i]) > vectors ? num_vectors(c, &tiles[i]) : vectors;
    for (int64_t i = 0; i < c->rows->num_rows; i++)
        products += (int64_t)(c->rows->query_starts[i + 1] - c->rows->query_starts[i]) * c->rows->kv_lens[i];
    struct region region = begin_region(products * c->num_heads * (c->key_dim + c->value_dim), c->rows->num_threads);
    size_t scratch_size = (sizeof(float) * scratch_floats(c, vectors) + 63) / 64 * 64;
    char *memory = aligned_alloc(64, scratch_size * region.num_threads);
    if (memory == NULL) {
        free(tiles);
        return -1;
    }
#pragma omp parallel num_threads(region.num_threads)
    {
        struct scratch s = divide_scratch(c, vectors, (float *)(memory + scratch_size * omp_get_thread_num()));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_tiles; i++)
            write_pool(c, &s, &tiles[i]);
        /* All keys are written here: the loop above ends with a barrier. A tile may read those of other tiles. */
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < num_tiles; i++)
            attend_tile(c, &s, &tiles[i]);
    }
    end_region(region);
    free(tiles);
    free(memory);
    return 0;
}
