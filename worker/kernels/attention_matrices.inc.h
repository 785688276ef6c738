/* Many query vectors of a head, with the matrix products of AMX: queries and weights are rounded to bfloat16, sums are
 * float32. The softmax is that of lanes. What is multiplied from the right lies in pairs of rows, as AMX takes it. */
#if HAS_TILES

enum { PAIRS = SPAN / 2, KEYS_AT_ONCE = 32 };

/* A pair of bfloat16 in each lane. */
static inline vi pairs_of(vf first, vf second)
{
    __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)first));
    __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)second));
    return (vi)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

/* Bring the query vectors [count, dim] of a head into lanes: [padded(count) / LANES, dim / 2, LANES] pairs. */
static void pair_queries(const float *queries, int64_t count, int64_t dim, void *turned)
{
    uint16_t *paired = turned;
    for (int64_t q = 0; q < padded(count); q++)
        for (int64_t d = 0; d < dim; d++)
            paired[((q / LANES * dim + d) / 2 * LANES + q % LANES) * 2 + d % 2] = q < count ? to_bf16(queries[q * dim + d]) : 0;
}

/* Copy the keys of a part: [SPAN, D], zeros behind them. Slots past the sequence's end may hold anything. */
static void copy_keys(const struct attention *c, const struct lanes *l, uint16_t *to)
{
    int64_t dim = c->key_dim, count = l->part->count;
    for (int64_t k = 0; k < count; k++) {
        int64_t slot = slot_of(c, l->part->row, l->part->begin + k) * c->num_kv_heads + l->kv_head;
        memcpy(to + k * dim, (const uint16_t *)c->keys + slot * dim, dim * sizeof *to);
    }
    memset(to + count * dim, 0, (SPAN - count) * dim * sizeof *to);
}

/* Copy the values of a part in pairs of keys: [PAIRS, Dv], zeros behind them. */
static void pair_values(const struct attention *c, const struct lanes *l, uint32_t *to)
{
    int64_t dim = c->value_dim, count = l->part->count;
    for (int64_t k = 0; k < count; k++, to += k % 2 ? 0 : dim) {
        int64_t slot = slot_of(c, l->part->row, l->part->begin + k) * c->num_kv_heads + l->kv_head;
        const uint16_t *from = (const uint16_t *)c->values + slot * dim;
        if (k % 2)
            for (int64_t d = 0; d < dim; d++)
                to[d] |= (uint32_t)from[d] << 16;
        else
            for (int64_t d = 0; d < dim; d++)
                to[d] = from[d];
    }
    to += count % 2 ? dim : 0;
    memset(to, 0, (PAIRS - (count + 1) / 2) * dim * sizeof *to);
}

/* Fill the scores [columns, SPAN, LANES] of one or two columns and of KEYS_AT_ONCE keys. */
static ALWAYS_INLINE void score_matrices(const uint16_t *keys, const uint32_t *queries, int64_t dim, const int columns,
                                         float *scores)
{
    enum { LINE = LANES * sizeof(float) };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < dim; d += AMX_INPUTS, keys += AMX_INPUTS, queries += AMX_INPUTS / 2 * LANES) {
        _tile_loadd(4, keys, dim * sizeof *keys);
        _tile_loadd(5, keys + AMX_ROWS * dim, dim * sizeof *keys);
        _tile_loadd(6, queries, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (columns == 2) {
            _tile_loadd(7, queries + dim / 2 * LANES, LINE);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, scores, LINE);
    _tile_stored(1, scores + AMX_ROWS * LANES, LINE);
    if (columns == 2) {
        _tile_stored(2, scores + SPAN * LANES, LINE);
        _tile_stored(3, scores + (SPAN + AMX_ROWS) * LANES, LINE);
    }
}

/* Bring the weights [count, LANES] of the keys that a column sees in pairs: [LANES, PAIRS], zeros for others. */
static void pair_weights(const float *scores, struct range seen, uint32_t *paired)
{
    for (int32_t k = seen.first / KEYS_AT_ONCE * KEYS_AT_ONCE; k < seen.end; k += KEYS_AT_ONCE) {
        vi v[LANES];
        for (int i = 0; i < LANES; i++) {
            vf weights[2];
            for (int j = 0; j < 2; j++) {
                int32_t key = k + 2 * i + j;
                weights[j] = key >= seen.first && key < seen.end ? load(scores + key * LANES) : splat(0.0f);
            }
            v[i] = pairs_of(weights[0], weights[1]);
        }
        transpose(v);
        for (int i = 0; i < LANES; i++)
            memcpy(paired + i * PAIRS + k / 2, &v[i], sizeof v[i]);
    }
}

/* sums [LANES, dim] += weights [LANES, PAIRS] @ values [PAIRS, dim], for the pairs of the keys that are seen. */
static void add_values_of_column(float *sums, const uint32_t *weights, const uint32_t *values, int64_t dim, struct range seen)
{
    int64_t first = seen.first / KEYS_AT_ONCE, end = (seen.end + KEYS_AT_ONCE - 1) / KEYS_AT_ONCE;
    /* The compiler wants the numbers of registers as literals. */
#define LOAD_WEIGHTS(step, into) \
    if (first <= step && step < end) \
        _tile_loadd(into, weights + step * LANES, PAIRS * sizeof *weights);
#define ADD_STEP(step, from) \
    if (first <= step && step < end) { \
        _tile_loadd(2, values + step * LANES * dim + d, dim * sizeof *values); \
        _tile_dpbf16ps(0, from, 2); \
        _tile_loadd(3, values + step * LANES * dim + d + LANES, dim * sizeof *values); \
        _tile_dpbf16ps(1, from, 3); \
    }
    LOAD_WEIGHTS(0, 4) LOAD_WEIGHTS(1, 5) LOAD_WEIGHTS(2, 6) LOAD_WEIGHTS(3, 7)
    for (int64_t d = 0; d < dim; d += 2 * LANES) {
        _tile_loadd(0, sums + d, dim * sizeof *sums);
        _tile_loadd(1, sums + d + LANES, dim * sizeof *sums);
        ADD_STEP(0, 4) ADD_STEP(1, 5) ADD_STEP(2, 6) ADD_STEP(3, 7)
        _tile_stored(0, sums + d, dim * sizeof *sums);
        _tile_stored(1, sums + d + LANES, dim * sizeof *sums);
    }
}

/* The same for the query vectors of a column that exist. */
static void add_to_existing(float *sums, int64_t num_vectors, const uint32_t *weights, const uint32_t *values, int64_t dim,
                            struct range seen)
{
    if (num_vectors == LANES) {
        add_values_of_column(sums, weights, values, dim, seen);
        return;
    }
    float own[LANES * dim];
    memset(own, 0, sizeof own);
    memcpy(own, sums, num_vectors * dim * sizeof(float));
    add_values_of_column(own, weights, values, dim, seen);
    memcpy(sums, own, num_vectors * dim * sizeof(float));
}

/* Whether many query vectors are computed in this way. */
static int uses_matrices(const struct attention *c)
{
    return c->rounds && c->dtype == BFLOAT16 && c->pool_dtype == BFLOAT16 && c->key_dim % AMX_INPUTS == 0 &&
           c->value_dim % (2 * LANES) == 0;
}

/* As attend_lanes. */
static void attend_matrices(const struct attention *c, const struct scratch *s, const struct tile *tile, const struct part *part)
{
    int64_t group = c->num_heads / c->num_kv_heads, members = (int64_t)tile->num_rows * tile->num_tokens;
    int64_t num_vectors = part->num_members * group, num_columns = padded(num_vectors) / LANES, dim = c->key_dim;
    struct column columns[num_columns];
    struct lanes l = {part, tile->first_head + part->first_head, (part->first_head * members + part->first_member) * group,
                      num_vectors, num_columns, 1, columns, {0}};
    int is_common = tile->num_rows > 1 && part->num_members > 1;
    uint16_t *keys = (uint16_t *)s->widened;
    uint32_t *values = (uint32_t *)s->widened, weights[LANES * PAIRS] __attribute__((aligned(64)));
    if (amx_rows != AMX_ROWS)
        configure_registers(AMX_ROWS);
    l.ahead.done = part->count;
    l.ahead.num_calls = (num_columns + 1) / 2;
    copy_keys(c, &l, keys);
    for (int64_t i = 0; i < num_columns; i += 2) {
        int64_t end = smaller(i + 2, num_columns);
        const uint32_t *queries = (const uint32_t *)s->turned + i * dim / 2 * LANES;
        prefetch_share(c, &l);
        for (int64_t j = i; j < end; j++)
            columns[j] = column_of(c, tile, &l, j);
        for (int64_t k = 0; k < part->count; k += KEYS_AT_ONCE) {
            float *scores = s->scores + (i * SPAN + k) * LANES;
            for (int64_t at = k; is_common && i == 0 && at < k + KEYS_AT_ONCE; at += LANE_SCORES)
                prefetch_own(c, tile, part->first_head, part->begin + at);
            if (k + KEYS_AT_ONCE <= columns[i].all.first || k >= columns[end - 1].all.end)
                continue; /* they see none of these */
            if (end - i == 2)
                score_matrices(keys + k * dim, queries, dim, 2, scores);
            else
                score_matrices(keys + k * dim, queries, dim, 1, scores);
        }
        for (int64_t j = i; j < end; j++)
            if (columns[j].all.first < columns[j].all.end)
                weigh_lanes(c, s, l.first_vector + j * LANES, smaller(LANES, num_vectors - j * LANES),
                            s->scores + j * SPAN * LANES, &columns[j]);
    }
    l.ahead.num_calls = num_columns;
    l.ahead.due = 0;
    pair_values(c, &l, values);
    for (int64_t i = 0; i < num_columns; i++) {
        struct range seen = columns[i].all;
        prefetch_share(c, &l);
        if (seen.first < seen.end) {
            pair_weights(s->scores + i * SPAN * LANES, seen, weights);
            add_to_existing(s->sums + (l.first_vector + i * LANES) * c->value_dim, smaller(LANES, num_vectors - i * LANES),
                            weights, values, c->value_dim, seen);
        }
    }
}
#endif
