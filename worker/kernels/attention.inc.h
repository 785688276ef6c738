/* Paged attention: each tile of query vectors runs over its keys and values where they lie in the pool.
 *
 * A tile is some tokens of one row, or some rows of one token each whose keys begin alike, and some key heads: one head for
 * chunks, which reuse what they read, and all heads for decodes if there are enough rows, so that memory is read in its
 * order. G = Hq / Hkv query heads share a key head. The Q query vectors of a tile are ordered by key head, member (token or
 * row), and head of the G. The softmax is computed online (Milakov, Gimelshein: Online normalizer calculation for softmax,
 * 2018): a span of keys at a time, with the running maximum and sum of each query vector.
 *
 * The few query vectors of a decode lie in rows: a register holds entries of one vector. More vectors of a head lie in
 * lanes: a register holds the same entry of LANES vectors (a column), so nothing is added across a register.
 *
 * Spans begin at multiples of SPAN, and each sum has one order in all tiles. So a token's result has the same bits whatever
 * the other rows are, whatever rows it shares keys with, and however its sequence was divided into chunks. (For blocks
 * that are no multiple of LANES, a sliding window may change the order.)
 */

enum {
    TILE_FLOATS = 65536,  /* of a chunk's tile, about: with its keys and values they stay in the second-level cache */
    TILE_VECTORS = 32,    /* least query vectors of such a tile, unless the chunk has fewer */
    TILES_PER_THREAD = 8, /* of chunks. With fewer, the tiles are made smaller */
    TILE_ROWS_MAX = 32,   /* rows of a tile that have keys in common */
    SPAN = 128,           /* keys whose scores are in memory at a time */
    ROWS_PER_THREAD = 4,  /* with fewer, the heads of a decode are divided among the threads */
    ROW_VECTORS = 8,      /* more query vectors of a head are computed side by side, in lanes */
    LANE_COLUMNS = 2, LANE_SCORES = 8, /* columns, and columns times keys, whose scores are computed together */
    LANE_VECTORS = 4, LANE_REGISTERS = LANES == 16 ? 4 : 2, /* query vectors and registers of values that are summed together */
    LANE_VALUES = 64, /* values whose registers stay in the first-level cache, while all query vectors pass them */
    LANE_BLOCK = 16,  /* the same where few query vectors read them in the pool, one block after the other */
};

_Static_assert(LANES >= LANE_SCORES || LANE_COLUMNS * LANES <= ROW_VECTORS, "few query vectors in lanes read LANES keys");

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
    float *scores;  /* [Q, SPAN], or of one head [Q padded / LANES, SPAN, LANES] if the query vectors are in lanes */
    float *turned;  /* [Q padded / LANES, D padded, LANES]: query vectors of one head in lanes */
    float *sums;    /* [Q, Dv padded], not divided yet */
    float *widened; /* [SPAN + LANE_SCORES, D or Dv padded] */
    float *maxima;  /* [Q] */
    float *totals;  /* [Q] */
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

static int64_t widened_floats(const struct attention *c)
{
    return (SPAN + LANE_SCORES) * padded(c->key_dim > c->value_dim ? c->key_dim : c->value_dim);
}

static int64_t scratch_floats(const struct attention *c, int64_t vectors)
{
    int64_t dims = padded(c->key_dim) + padded(c->value_dim);
    return padded(vectors * (dims + 2)) + (vectors + LANES) * (SPAN + padded(c->key_dim)) + widened_floats(c);
}

static struct scratch divide_scratch(const struct attention *c, int64_t vectors, float *memory)
{
    struct scratch s; /* what vectors are loaded from is aligned */
    s.query = memory;
    s.scores = s.query + vectors * padded(c->key_dim);
    s.turned = s.scores + (vectors + LANES) * SPAN;
    s.sums = s.turned + (vectors + LANES) * padded(c->key_dim);
    s.widened = s.sums + vectors * padded(c->value_dim);
    s.maxima = s.widened + widened_floats(c);
    s.totals = s.maxima + vectors;
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

/* Fill the scores [columns, SPAN, LANES] of some keys: their dot products with the query vectors in lanes. The order of the
 * sums is that of score_tile: one for each of the LANES entries of a vector, which are then added in pairs, the most
 * distant ones first. With the entries in the order of their reversed bits few sums wait for their partner. */
static ALWAYS_INLINE void score_columns(const float *turned, const float *keys, int64_t distance, int64_t dim,
                                        const int columns, float *scores)
{
    enum { NUM = LANES == 16 ? 2 : 1 }; /* entries at a time: what the registers hold */
    const int num_keys = LANE_SCORES / columns;
    vf sums[5][LANE_SCORES]; /* of 1, 2, 4, 8 and 16 entries */
    int level = 0;
    UNROLLED for (int i = 0; i < LANES; i += NUM) {
        vf own[NUM][LANE_SCORES] = {{{0}}};
        for (int64_t d = (i & 1) * LANES / 2 + (i & 2) * LANES / 8 + (i & 4) * LANES / 32 + (i & 8) * LANES / 128;
             d < dim; d += LANES)
            UNROLLED for (int j = 0; j < NUM * LANE_SCORES; j++) {
                int64_t at = d + j / LANE_SCORES * LANES / 2;
                vf entries = load(turned + (j % LANE_SCORES / num_keys * dim + at) * LANES);
                own[j / LANE_SCORES][j % LANE_SCORES] += entries * splat(keys[j % num_keys * distance + at]);
            }
        UNROLLED for (int j = 0; j < LANE_SCORES && NUM == 2; j++)
            own[0][j] += own[NUM - 1][j];
        UNROLLED for (level = NUM - 1; i >> level & 1; level++)
            UNROLLED for (int j = 0; j < LANE_SCORES; j++)
                own[0][j] = sums[level][j] + own[0][j];
        memcpy(sums[level], own[0], sizeof own[0]);
    }
    UNROLLED for (int j = 0; j < LANE_SCORES; j++)
        store(scores + (j / num_keys * SPAN + j % num_keys) * LANES, sums[level][j]);
}

/* While the rows of a tile attend to their common positions, which is bound by arithmetic, prefetch a share of what each
 * row has of its own, which is bound by memory. A step is LANE_SCORES common keys of a head. */
static ALWAYS_INLINE void prefetch_own(const struct attention *c, const struct tile *tile, int64_t head, int64_t position)
{
    int64_t steps_per_row = tile->num_heads * tile->common / (tile->num_rows * LANE_SCORES);
    if (steps_per_row == 0 || tile->num_heads < c->num_kv_heads)
        return;
    int64_t step = (head * tile->common + position) / LANE_SCORES, member = step / steps_per_row;
    if (member >= tile->num_rows)
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
            prefetch_unless(keys.dtype == next.dtype, &next, dim);
            if (keys.dtype == FLOAT32)
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

/* The keys of a part that a member or a query vector sees, counted from the part's first one. */
struct range { int32_t first, end; };

/* The keys that LANES query vectors in lanes see, each and all together. */
struct column {
    vi first, end;
    struct range all;
    int is_masked; /* some do not see all of these */
};

/* The same for a column, of whose query vectors `num_vectors` exist. Lane by lane it is the same arithmetic. */
static void weigh_lanes(const struct attention *c, const struct scratch *s, int64_t vector, int64_t num_vectors,
                        float *scores, const struct column *column)
{
    vf before = splat(-INFINITY), totals = {0}, sums[LANES] = {{0}}, sum = {0};
    memcpy(&before, s->maxima + vector, num_vectors * sizeof(float));
    memcpy(&totals, s->totals + vector, num_vectors * sizeof(float));
    vf maximum = before;
    for (int32_t k = column->all.first; k < column->all.end; k++) {
        vf score = load(scores + k * LANES);
        if (c->softcap > 0 || column->is_masked) {
            score = mask(c, score, (column->first <= k) & (column->end > k));
            store(scores + k * LANES, score);
        }
        maximum = larger(score, maximum);
    }
    for (int32_t k = column->all.first; k < column->all.end; k++) {
        vf weight = weight_of(load(scores + k * LANES), maximum);
        store(scores + k * LANES, weight);
        sums[k & (LANES - 1)] += weight;
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

/* The weights of query vectors in rows [Q, SPAN] or in lanes [SPAN, LANES]. */
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
            struct weights weights = {s->scores + q * SPAN + k, SPAN, 1};
            prefetch_unless(values.dtype == next.dtype, &next, dim);
            if (values.dtype == FLOAT32)
                add_vectors(sums, weights, num_queries, values, count, dim, FLOAT32, next);
            else
                add_vectors(sums, weights, num_queries, values, count, dim, BFLOAT16, next);
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
    int64_t first_vector = (part->first_head * members + part->first_member) * group;
    for (int64_t i = 0; i < part->num_members; i++) {
        struct range range = seen_by(c, tile, part, part->first_member + i);
        for (int64_t head = 0; head < part->num_heads; head++)
            for (int64_t g = 0; g < group; g++)
                weigh_row(c, s, first_vector + (head * members + i) * group + g, part->count, range.first, range.end);
    }
}

/* --- query vectors in lanes --- */

/* What is prefetched: the keys of a part, its values, the keys behind it. As many as it has, evenly over a number of calls. */
struct ahead {
    int64_t done;            /* vectors, from the part's first key on */
    int64_t due, num_calls;  /* due: vectors times calls */
    const char *at;          /* the next one */
    int64_t left, size, gap; /* vectors of its block, bytes of one, and from one to the next */
};

/* A part, of one head, whose query vectors are in lanes. */
struct lanes {
    const struct part *part;
    int64_t kv_head, first_vector, num_vectors, num_columns;
    int is_copied; /* many query vectors read copies of the keys and values, in the order of the memory. For few it does not pay */
    struct column *columns;
    struct ahead ahead;
};

static inline void find_ahead(const struct attention *c, struct lanes *l)
{
    struct ahead *a = &l->ahead;
    int64_t count = l->part->count, is_value = a->done >= count && a->done < 2 * count;
    int64_t position = l->part->begin + a->done - (a->done >= count ? count : 0);
    int64_t end = a->done < count ? l->part->begin + count : l->part->end;
    a->left = smaller(end - position, c->block_size - (uint32_t)position % (uint32_t)c->block_size);
    if (a->left <= 0)
        return;
    a->size = (is_value ? c->value_dim : c->key_dim) * (c->pool_dtype == FLOAT32 ? 4 : 2);
    a->gap = a->size * c->num_kv_heads;
    a->at = (const char *)(is_value ? c->values : c->keys) + slot_of(c, l->part->row, position) * a->gap + l->kv_head * a->size;
}

static inline void prefetch_share(const struct attention *c, struct lanes *l)
{
    struct ahead *a = &l->ahead;
    for (a->due += l->part->count; a->due >= a->num_calls; a->due -= a->num_calls) {
        if (a->left <= 0 || a->done == 2 * l->part->count)
            find_ahead(c, l);
        if (a->left <= 0)
            return;
        for (int64_t byte = 0; byte < a->size; byte += 64)
            __builtin_prefetch(a->at + byte, 0, 2);
        a->done++;
        a->left--;
        a->at += a->gap;
    }
}

/* Copy the keys or values of a part: [count, dim padded], and zeros, so that their number is a multiple of LANE_SCORES. */
static void copy_vectors(const struct attention *c, const struct lanes *l, const void *pool, int64_t dim, float *to)
{
    for (int64_t position = l->part->begin, end = position + l->part->count; position < end;) {
        int64_t slot = slot_of(c, l->part->row, position), left = c->block_size - slot % c->block_size;
        for (int64_t stop = smaller(position + left, end); position < stop; position++, slot++, to += padded(dim))
            widen(to, pool, (slot * c->num_kv_heads + l->kv_head) * dim, dim, c->pool_dtype);
    }
    memset(to, 0, sizeof(float) * LANE_SCORES * padded(dim));
}

/* Return keys or values of a part, from the k-th on: up to `most`, and at least `needed` with zeros behind them. */
static inline struct vectors vectors_from(const struct attention *c, const struct scratch *s, const struct lanes *l,
                                          const void *pool, int64_t dim, int64_t k, int64_t most, int64_t needed)
{
    if (l->is_copied)
        return (struct vectors){s->widened + k * padded(dim), padded(dim), FLOAT32};
    int64_t count = smaller(most, l->part->count - k);
    return vectors_at(c, pool, dim, l->part, l->kv_head, l->part->begin + k, count, needed, s->widened);
}

/* Return what a column sees of a part. The query vectors of one row see more and more keys, those of several rows all. */
static struct column column_of(const struct attention *c, const struct tile *tile, const struct lanes *l, int64_t number)
{
    int64_t group = c->num_heads / c->num_kv_heads, first = number * LANES, end = smaller(first + LANES, l->num_vectors);
    struct range one = seen_by(c, tile, l->part, l->part->first_member + first / group);
    struct range last = seen_by(c, tile, l->part, l->part->first_member + (end - 1) / group);
    struct column column = {(vi){0} + one.first, (vi){0} + one.end, {one.first, last.end}, 0};
    column.is_masked = one.first != last.first || one.end != last.end;
    for (int64_t i = first; i < end && column.is_masked; i++) {
        struct range range = seen_by(c, tile, l->part, l->part->first_member + i / group);
        column.first[i - first] = range.first;
        column.end[i - first] = range.end;
    }
    return column;
}

/* Compute the weights of LANE_COLUMNS columns, or one. */
static void weigh_columns(const struct attention *c, const struct scratch *s, const struct tile *tile, struct lanes *l,
                          int64_t number)
{
    int64_t dim = padded(c->key_dim), end = smaller(number + LANE_COLUMNS, l->num_columns);
    const float *turned = s->turned + number * LANES * dim;
    struct vectors keys = {NULL, 0, FLOAT32};
    for (int64_t i = number; i < end; i++)
        l->columns[i] = column_of(c, tile, l, i);
    for (int64_t k = 0; k < l->part->count; k += LANE_SCORES) {
        float *scores = s->scores + (number * SPAN + k) * LANES;
        prefetch_share(c, l);
        if (number == 0 && tile->num_rows > 1 && l->part->num_members > 1)
            prefetch_own(c, tile, l->part->first_head, l->part->begin + k);
        if (k % LANES == 0)
            keys = vectors_from(c, s, l, c->keys, c->key_dim, k, LANES, LANES);
        if (k + LANE_SCORES <= l->columns[number].all.first || k >= l->columns[end - 1].all.end)
            continue; /* they see none of these */
        const float *key = (const float *)keys.first + k % LANES * keys.distance;
        if (end - number == 1)
            score_columns(turned, key, keys.distance, dim, 1, scores);
        for (int i = 0; i < LANE_SCORES && end - number == LANE_COLUMNS; i += LANE_SCORES / LANE_COLUMNS)
            score_columns(turned, key + i * keys.distance, keys.distance, dim, LANE_COLUMNS, scores + i * LANES);
    }
    for (int64_t i = number; i < end; i++)
        if (l->columns[i].all.first < l->columns[i].all.end)
            weigh_lanes(c, s, l->first_vector + i * LANES, smaller(LANES, l->num_vectors - i * LANES),
                        s->scores + i * SPAN * LANES, &l->columns[i]);
}

/* sums [num_vectors, dim] += weights [count, LANES] @ values [count, dim], in columns [first, end) of dim. */
static inline void add_products_of(float *sums, const float *weights, int64_t num_vectors, struct vectors values,
                                   int64_t first, int64_t end, int64_t count, int64_t dim)
{
    struct vectors none = {NULL, 0, FLOAT32};
    struct weights own = {weights, 1, LANES};
    for (; num_vectors >= LANE_VECTORS; num_vectors -= LANE_VECTORS, own.first += LANE_VECTORS, sums += LANE_VECTORS * dim)
        if (end - first == LANE_REGISTERS * LANES)
            add_columns(sums, own, values, first, count, dim, LANE_VECTORS, LANE_REGISTERS, FLOAT32, none);
        else
            for (int64_t at = first; at < end; at += LANES)
                add_columns(sums, own, values, at, count, dim, LANE_VECTORS, 1, FLOAT32, none);
    for (; num_vectors > 0; num_vectors--, own.first++, sums += dim)
        for (int64_t at = first; at < end; at += LANES)
            add_columns(sums, own, values, at, count, dim, 1, 1, FLOAT32, none);
}

/* Add the products of the weights and values to the sums. */
static void add_lanes(const struct attention *c, const struct scratch *s, struct lanes *l, int64_t step)
{
    int64_t dim = padded(c->value_dim), wide = LANE_REGISTERS * LANES;
    for (int64_t k = 0; k < l->part->count; k += step) {
        struct vectors all = vectors_from(c, s, l, c->values, c->value_dim, k, step, 0);
        for (int64_t at = 0; at < dim; at += wide)
            for (int64_t i = 0; i < l->num_columns; i++) {
                struct range seen = l->columns[i].all;
                int64_t first = k > seen.first ? k : seen.first, count = smaller(k + step, seen.end) - first;
                struct vectors values = {(const float *)all.first + (first - k) * all.distance, all.distance, FLOAT32};
                prefetch_share(c, l);
                if (count > 0)
                    add_products_of(s->sums + (l->first_vector + i * LANES) * dim, s->scores + (i * SPAN + first) * LANES,
                                    smaller(LANES, l->num_vectors - i * LANES), values, at, smaller(at + wide, dim), count,
                                    dim);
            }
    }
}

static void attend_lanes(const struct attention *c, const struct scratch *s, const struct tile *tile,
                         const struct part *part, int is_first)
{
    int64_t group = c->num_heads / c->num_kv_heads, members = (int64_t)tile->num_rows * tile->num_tokens;
    int64_t num_vectors = part->num_members * group, num_columns = padded(num_vectors) / LANES;
    struct column columns[num_columns];
    struct lanes l = {part, tile->first_head + part->first_head, (part->first_head * members + part->first_member) * group,
                      num_vectors, num_columns, num_columns > LANE_COLUMNS, columns, {0}};
    int64_t step = l.is_copied ? LANE_VALUES : LANE_BLOCK, wide = LANE_REGISTERS * LANES;
    int64_t distance = l.is_copied ? part->count : 2 * LANES; /* from a vector in use to one that is prefetched */
    l.ahead.done = l.is_copied || !is_first ? distance : 0;
    l.ahead.num_calls = (num_columns + LANE_COLUMNS - 1) / LANE_COLUMNS * ((part->count + LANE_SCORES - 1) / LANE_SCORES);
    l.ahead.due = (distance - l.ahead.done) * l.ahead.num_calls;
    if (l.is_copied)
        copy_vectors(c, &l, c->keys, c->key_dim, s->widened);
    for (int64_t i = 0; i < num_columns; i += LANE_COLUMNS)
        weigh_columns(c, s, tile, &l, i);
    l.ahead.num_calls = (part->count + step - 1) / step * ((padded(c->value_dim) + wide - 1) / wide) * num_columns;
    l.ahead.due = 0;
    if (l.is_copied)
        copy_vectors(c, &l, c->values, c->value_dim, s->widened);
    add_lanes(c, s, &l, step);
}

/* Attend to positions [begin, end), span by span, with some members of a tile. */
static void attend_part(const struct attention *c, const struct scratch *s, const struct tile *tile, int64_t row,
                        int64_t first_member, int64_t num_members, int64_t begin, int64_t end)
{
    int64_t group = c->num_heads / c->num_kv_heads, per_head = (int64_t)tile->num_rows * tile->num_tokens * group;
    int64_t dim = padded(c->key_dim), is_in_lanes = num_members * group > ROW_VECTORS;
    int64_t num_heads = is_in_lanes ? 1 : tile->num_heads;
    for (int64_t head = 0; head < tile->num_heads; head += num_heads) {
        struct part part = {row, first_member, num_members, head, num_heads, begin, 0, end};
        if (is_in_lanes)
            turn_queries(s->query + (head * per_head + first_member * group) * dim, num_members * group, dim, s->turned);
        for (; part.begin < end; part.begin += part.count) {
            part.count = smaller(SPAN - part.begin % SPAN, end - part.begin);
            if (is_in_lanes) {
                attend_lanes(c, s, tile, &part, part.begin == begin);
                continue;
            }
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

/* Write keys and values, in the order of the memory: those of tokens, counted over all rows, and of heads from `first` up to
 * `end`, where a token counts as many as it has heads. */
static void write_pool(const struct attention *c, const struct scratch *s, int64_t first, int64_t end)
{
    const struct attention_rows *rows = c->rows;
    int64_t token = first / c->num_kv_heads, head = first % c->num_kv_heads;
    for (int64_t row = 0, left = end - first; left > 0; row++)
        for (; left > 0 && token < rows->query_starts[row + 1]; token++, head = 0) {
            int64_t position = rows->kv_lens[row] - rows->query_starts[row + 1] + token;
            int64_t slot = slot_of(c, row, position) * c->num_kv_heads;
            for (; left > 0 && head < c->num_kv_heads; head++, left--) {
                int64_t to = slot + head;
                widen(s->widened, c->key, head * c->key_head_stride + token * c->key_token_stride, c->key_dim, c->dtype);
                prepare(c, s->widened, c->key_norm, position);
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
    int64_t tiles = (rows->num_decodes + TILE_ROWS_MAX * rows->num_threads - 1) / (TILE_ROWS_MAX * rows->num_threads);
    int64_t even = (rows->num_decodes + tiles * rows->num_threads - 1) / (tiles * rows->num_threads); /* as many for each thread */
    most = smaller(even, most > ROW_VECTORS ? padded(most) : most); /* no lanes without a row */
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

/* Return how many products of query vectors and keys a chunk has, or more. */
static int64_t work_of(const struct attention *c, int64_t row)
{
    return (c->rows->query_starts[row + 1] - c->rows->query_starts[row]) * (int64_t)c->rows->kv_lens[row] * c->num_heads;
}

/* Return the tokens of a tile of a chunk. Each of its query vectors, with its sums and the scores of a span, takes a part of
 * the second-level cache. Keys and values are read once for each tile. So the tiles are large, unless one would be too much
 * of the work of all. */
static int64_t tokens_of_tile(const struct attention *c, int64_t row, int64_t work)
{
    int64_t most = TILE_FLOATS / (c->key_dim + c->value_dim + SPAN);
    int64_t share = work / (TILES_PER_THREAD * c->rows->num_threads * (int64_t)c->rows->kv_lens[row]);
    int64_t vectors = smaller(most, share) / TILE_VECTORS * TILE_VECTORS;
    int64_t tokens = (vectors > TILE_VECTORS ? vectors : TILE_VECTORS) / (c->num_heads / c->num_kv_heads);
    return tokens > 1 ? tokens : 1;
}

/* List the tiles, about the most expensive ones first: chunks from their ends, then decodes. Return their number. */
static int64_t list_tiles(const struct attention *c, struct tile *tiles)
{
    const struct attention_rows *rows = c->rows;
    int64_t count = 0, work = 0;
    int64_t heads = rows->num_rows >= ROWS_PER_THREAD * rows->num_threads ? c->num_kv_heads : 1;
    for (int64_t i = rows->num_decodes; i < rows->num_rows; i++)
        work += work_of(c, rows->order[i]);
    for (int64_t i = rows->num_decodes; i < rows->num_rows; i++) {
        int64_t step = tokens_of_tile(c, rows->order[i], work);
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
        int64_t written = c->rows->query_starts[c->rows->num_rows] * c->num_kv_heads, thread = omp_get_thread_num();
        write_pool(c, &s, written * thread / omp_get_num_threads(), written * (thread + 1) / omp_get_num_threads());
#pragma omp barrier /* a tile reads keys that any thread has written */
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < num_tiles; i++)
            attend_tile(c, &s, &tiles[i]);
    }
    end_region(region);
    free(tiles);
    free(memory);
    return 0;
}
