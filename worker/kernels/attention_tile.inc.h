/* What a tile of paged attention works with, in rows and in lanes. See attention.inc.h. */

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

/* Return the queries, keys and values of a token, in elements. */
static inline int64_t qkv_width(const struct attention *c)
{
    return (c->num_heads + c->num_kv_heads) * c->key_dim + c->num_kv_heads * c->value_dim;
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
        int64_t offset = from.token * qkv_width(c) + from.head * c->key_dim;
        float *query = s->query + q * padded(c->key_dim);
        widen(query, c->qkv, offset, c->key_dim, c->dtype);
        prepare(c, query, c->query_norm, from.position);
        for (int64_t d = 0; d < c->key_dim; d++)
            query[d] *= c->scaling;
        s->maxima[q] = -INFINITY;
        s->totals[q] = 0;
    }
    memset(s->sums, 0, sizeof(float) * count * padded(c->value_dim));
}

/* Return what the sums of a query vector are multiplied with: 1 / the total of its weights, with that of the sink. */
static inline float final_factor(const struct attention *c, float maximum, float total, int64_t head)
{
    if (c->sinks == NULL)
        return 1.0f / total;
    float largest = c->sinks[head] > maximum ? c->sinks[head] : maximum; /* else an exponential may overflow */
    float old = v_exp(splat(maximum - largest))[0];
    return old / (total * old + v_exp(splat(c->sinks[head] - largest))[0]);
}

static void write_output(const struct attention *c, const struct scratch *s, const struct tile *tile)
{
    int64_t count = num_vectors(c, tile);
    for (int64_t q = 0; q < count; q++) {
        const float *sums = s->sums + q * padded(c->value_dim);
        struct origin to = origin_of(c, tile, q);
        float factor = final_factor(c, s->maxima[q], s->totals[q], to.head);
        int64_t offset = (to.token * c->num_heads + to.head) * c->value_dim;
        narrow(c->output, offset, sums, c->value_dim, c->dtype, factor);
    }
}

/* The keys of a part that a member or a query vector sees, counted from the part's first one. */
struct range { int32_t first, end; };

static inline struct range seen_by(const struct attention *c, const struct tile *tile, const struct part *part,
                                   int64_t member)
{
    int64_t end = origin_of_member(c, tile, member).position + 1, first = c->window > 0 ? end - c->window : 0;
    return (struct range){(int32_t)(first > part->begin ? smaller(first - part->begin, part->count) : 0),
                          (int32_t)(end > part->begin ? smaller(end - part->begin, part->count) : 0)};
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

/* Prefetch a part of a vector. GCC removes calls of functions that only prefetch, for they seem to have no effect. So they
 * are always inlined. */
static ALWAYS_INLINE void prefetch(struct vectors vectors, int64_t index, int64_t first, int64_t count, const int64_t dtype)
{
    const int64_t size = dtype == FLOAT32 ? 4 : 2;
    const char *from = (const char *)vectors.first + (index * vectors.distance + first) * size;
    for (int64_t byte = 0; byte < count * size; byte += 64)
        __builtin_prefetch(from + byte, 0, 2);
}

static ALWAYS_INLINE vf load_item(const void *from, int64_t offset, const int64_t dtype)
{
    return dtype == FLOAT32 ? load((const float *)from + offset) : load_bf16((const uint16_t *)from + offset);
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
