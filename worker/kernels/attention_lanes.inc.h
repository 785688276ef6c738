/* Many query vectors of a head, in lanes: a register holds the same entry of LANES vectors (a column). See attention.inc.h. */

/* The keys that LANES query vectors in lanes see, each and all together. */
struct column {
    vi first, end;
    struct range all;
    int is_masked; /* some do not see all of these */
};

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

/* `weigh_row` for a column, of whose query vectors `num_vectors` exist. Lane by lane it is the same arithmetic. */
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
