/* Few query vectors of a head, in rows: a register holds entries of one vector. See attention.inc.h. */

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

/* Attend to the keys and values of a part. */
static void attend_rows(const struct attention *c, const struct scratch *s, const struct tile *tile, const struct part *part)
{
    score_keys(c, s, tile, part);
    weigh(c, s, tile, part);
    add_values(c, s, tile, part);
}
