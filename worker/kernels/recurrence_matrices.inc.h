/* The recurrence of many tokens as products of matrices, with AMX: keys, queries, what is added to a state, and the state
 * where it is multiplied, are rounded to bfloat16, sums and the state itself are float32.
 *
 * For the tokens 1 to n of a group, with c[t] = the sum of the logarithms of the factors up to t, and with Z before them:
 *
 *   added[t] = gain[t] * (value[t] - exp(c[t]) * k[t] Z - sum over j < t of exp(c[t] - c[j]) * (k[t] k[j]) * added[j])
 *   result[t] = exp(c[t]) * q[t] Z + sum over j <= t of exp(c[t] - c[j]) * (q[t] k[j]) * added[j]
 *   Z = exp(c[n]) * Z + sum over j of exp(c[n] - c[j]) * k[j] added[j]
 *
 * (Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024, section 3.3). With STATE_SPACE, added[t] = gain[t] * value[t]. */
#if HAS_TILES

enum { GROUP_TOKENS = 32, MOST_ENTRIES = 128, WIDE = 4 * LANES };

/* One head, for the tokens of a group. Rows of keys come first, those of queries behind them. */
struct group {
    uint16_t vectors[2 * GROUP_TOKENS * MOST_ENTRIES];     /* [64, D], keys and queries */
    uint32_t turned_keys[MOST_ENTRIES / 2 * GROUP_TOKENS]; /* [D / 2, 32], pairs of entries */
    uint32_t paired_state[MOST_ENTRIES / 2 * MOST_ENTRIES]; /* [D / 2, Dv], pairs of rows */
    float read[2 * GROUP_TOKENS * MOST_ENTRIES];           /* [64, Dv], vectors @ Z */
    float scores[2 * GROUP_TOKENS * GROUP_TOKENS];         /* [64, 32], vectors @ keys */
    float added[GROUP_TOKENS * MOST_ENTRIES];              /* [32, Dv] */
    uint32_t paired_added[GROUP_TOKENS / 2 * MOST_ENTRIES]; /* [16, Dv], pairs of tokens */
    uint16_t weighted_keys[MOST_ENTRIES * GROUP_TOKENS];   /* [D, 32], of exp(c[n] - c[j]) * k[j] */
    float logs[GROUP_TOKENS];                              /* c */
} __attribute__((aligned(64)));

static inline void store_bf16(uint16_t *to, vf numbers)
{
    __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)numbers);
    memcpy(to, &rounded, sizeof rounded);
}

/* Whether long rows are computed in this way. */
static int uses_groups(const struct recurrence *c)
{
    return c->rounds && c->dtype == BFLOAT16 && c->key_dim % AMX_INPUTS == 0 && c->key_dim <= MOST_ENTRIES &&
           c->value_dim % WIDE == 0 && c->value_dim <= MOST_ENTRIES;
}

/* Registers 0 to 3, for 32 x 32 sums: add the products of 32 rows, in 4 and 5, and 32 columns, in 6 and 7. */
static ALWAYS_INLINE void add_products_of_tiles(void)
{
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

static ALWAYS_INLINE void store_tiles(float *to, int64_t width)
{
    _tile_stored(0, to, width * sizeof *to);
    _tile_stored(1, to + LANES, width * sizeof *to);
    _tile_stored(2, to + AMX_ROWS * width, width * sizeof *to);
    _tile_stored(3, to + AMX_ROWS * width + LANES, width * sizeof *to);
}

/* Write the products [32, 32] of rows of `left` [32, depth] and columns of `right` [depth / 2, width] pairs. */
static void multiply_rows(const uint16_t *left, const uint32_t *right, int64_t depth, int64_t width, float *products)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < depth; d += AMX_INPUTS) {
        _tile_loadd(4, left + d, depth * sizeof *left);
        _tile_loadd(5, left + AMX_ROWS * depth + d, depth * sizeof *left);
        _tile_loadd(6, right + d / 2 * width, width * sizeof *right);
        _tile_loadd(7, right + d / 2 * width + LANES, width * sizeof *right);
        add_products_of_tiles();
    }
    store_tiles(products, width);
}

/* Add weighted keys @ added to 32 x 32 numbers of the state. */
static void add_to_state(const uint16_t *keys, const uint32_t *added, int64_t width, float *state)
{
    _tile_loadd(0, state, WIDE * sizeof *state);
    _tile_loadd(1, state + LANES, WIDE * sizeof *state);
    _tile_loadd(2, state + AMX_ROWS * WIDE, WIDE * sizeof *state);
    _tile_loadd(3, state + AMX_ROWS * WIDE + LANES, WIDE * sizeof *state);
    _tile_loadd(4, keys, GROUP_TOKENS * sizeof *keys);
    _tile_loadd(5, keys + AMX_ROWS * GROUP_TOKENS, GROUP_TOKENS * sizeof *keys);
    _tile_loadd(6, added, width * sizeof *added);
    _tile_loadd(7, added + LANES, width * sizeof *added);
    add_products_of_tiles();
    store_tiles(state, WIDE);
}

/* Bring keys and queries into the forms in which they are multiplied. `mixed` is that of the first token. */
static void turn_vectors(const struct recurrence *c, const float *mixed, int64_t key_head, struct group *g)
{
    int64_t dim = c->key_dim, at[2] = {c->key_at + key_head * dim, c->query_at + key_head * dim};
    for (int64_t row = 0; row < 2 * GROUP_TOKENS; row++)
        for (int64_t d = 0; d < dim; d += LANES)
            store_bf16(g->vectors + row * dim + d,
                       load(mixed + row % GROUP_TOKENS * c->num_channels + at[row / GROUP_TOKENS] + d));
    for (int64_t t = 0; t < GROUP_TOKENS; t += LANES)
        for (int64_t d = 0; d < dim; d += 2 * LANES) {
            vi v[LANES];
            for (int i = 0; i < LANES; i++)
                memcpy(&v[i], g->vectors + (t + i) * dim + d, sizeof v[i]);
            transpose(v);
            for (int i = 0; i < LANES; i++)
                memcpy(g->turned_keys + (d / 2 + i) * GROUP_TOKENS + t, &v[i], sizeof v[i]);
        }
    for (int64_t t = 0; t < GROUP_TOKENS; t += LANES)
        for (int64_t d = 0; d < dim; d += LANES) {
            vi v[LANES];
            for (int i = 0; i < LANES; i++) {
                vf weight = splat(expf(g->logs[GROUP_TOKENS - 1] - g->logs[t + i]));
                v[i] = (vi)(weight * load(mixed + (t + i) * c->num_channels + at[0] + d));
            }
            transpose(v);
            for (int i = 0; i < LANES; i++)
                store_bf16(g->weighted_keys + (d + i) * GROUP_TOKENS + t, (vf)v[i]);
        }
}

/* Pair the rows of the state, and multiply it by the factors of all tokens. */
static void pair_state(const struct recurrence *c, float *state, struct group *g)
{
    vf factor = splat(expf(g->logs[GROUP_TOKENS - 1]));
    for (int64_t column = 0; column < c->value_dim; column += WIDE, state += c->key_dim * WIDE)
        for (int64_t d = 0; d < c->key_dim; d += 2)
            for (int64_t i = 0; i < WIDE; i += LANES) {
                float *first = state + d * WIDE + i, *second = first + WIDE;
                vi pairs = pairs_of(load(first), load(second));
                memcpy(g->paired_state + d / 2 * c->value_dim + column + i, &pairs, sizeof pairs);
                store(first, load(first) * factor);
                store(second, load(second) * factor);
            }
}

/* Add the weighted rows of what the first tokens have added, for WIDE columns. */
static ALWAYS_INLINE void sum_rows(const struct group *g, const float *weights, int64_t count, int64_t width, int64_t column,
                                   vf sums[4])
{
    for (int64_t j = 0; j < count; j++) {
        vf weight = splat(weights[j]);
        UNROLLED for (int i = 0; i < 4; i++) sums[i] += weight * load(g->added + j * width + column + i * LANES);
    }
}

/* Compute what each token adds to the state, and its results. */
static void add_and_read(const struct recurrence *c, const struct step_part *part, int64_t first, int64_t head,
                         struct group *g)
{
    int64_t width = c->value_dim;
    vf skip = splat(c->skips == NULL ? 0 : c->skips[head]);
    for (int64_t t = 0; t < GROUP_TOKENS; t++) {
        const float *value = part->mixed + (first + t) * c->num_channels + c->value_at + head * width;
        const float *factors = part->factors + ((first + t) * c->num_heads + head) * FACTORS;
        float *result = part->results + ((first + t) * c->num_heads + head) * width;
        float of_key[GROUP_TOKENS], of_query[GROUP_TOKENS];
        for (int64_t j = 0; j < GROUP_TOKENS; j += LANES) {
            vf factor = v_exp(lesser(splat(g->logs[t]) - load(g->logs + j), splat(0.0f)));
            store(of_key + j, -factor * load(g->scores + t * GROUP_TOKENS + j));
            store(of_query + j, factor * load(g->scores + (GROUP_TOKENS + t) * GROUP_TOKENS + j));
        }
        vf decay = splat(expf(g->logs[t])), gain = splat(factors[1]);
        for (int64_t column = 0; column < width; column += WIDE) {
            vf sums[4];
            UNROLLED for (int i = 0; i < 4; i++) sums[i] = load(value + column + i * LANES);
            if (c->rule == DELTA_RULE) {
                UNROLLED for (int i = 0; i < 4; i++) sums[i] -= decay * load(g->read + t * width + column + i * LANES);
                sum_rows(g, of_key, t, width, column, sums);
            }
            UNROLLED for (int i = 0; i < 4; i++) {
                store(g->added + t * width + column + i * LANES, gain * sums[i]);
                sums[i] = skip * load(value + column + i * LANES) +
                          decay * load(g->read + (GROUP_TOKENS + t) * width + column + i * LANES);
            }
            sum_rows(g, of_query, t + 1, width, column, sums);
            UNROLLED for (int i = 0; i < 4; i++) store(result + column + i * LANES, sums[i]);
        }
    }
}

/* Run the recurrence of a head over GROUP_TOKENS tokens of a row, from the token `first` of the part on. */
static void recur_group(const struct recurrence *c, const struct step_part *part, int64_t first, int64_t head, float *state,
                        struct group *g)
{
    int64_t dim = c->key_dim, width = c->value_dim;
    float sum = 0;
    for (int64_t t = 0; t < GROUP_TOKENS; t++)
        g->logs[t] = sum += part->factors[((first + t) * c->num_heads + head) * FACTORS + 2];
    turn_vectors(c, part->mixed + first * c->num_channels, head / (c->num_heads / c->num_key_heads), g);
    pair_state(c, state, g);
    if (amx_rows != AMX_ROWS)
        configure_registers(AMX_ROWS);
    for (int64_t row = 0; row < 2 * GROUP_TOKENS; row += GROUP_TOKENS) {
        multiply_rows(g->vectors + row * dim, g->turned_keys, dim, GROUP_TOKENS, g->scores + row * GROUP_TOKENS);
        for (int64_t column = 0; column < width; column += 2 * LANES)
            multiply_rows(g->vectors + row * dim, g->paired_state + column, dim, width, g->read + row * width + column);
    }
    add_and_read(c, part, first, head, g);
    for (int64_t t = 0; t < GROUP_TOKENS; t += 2)
        for (int64_t column = 0; column < width; column += LANES) {
            vi pairs = pairs_of(load(g->added + t * width + column), load(g->added + (t + 1) * width + column));
            memcpy(g->paired_added + t / 2 * width + column, &pairs, sizeof pairs);
        }
    for (int64_t d = 0; d < dim; d += 2 * AMX_ROWS)
        for (int64_t column = 0; column < width; column += 2 * LANES)
            add_to_state(g->weighted_keys + d * GROUP_TOKENS, g->paired_added + column, width,
                         state + column / WIDE * WIDE * dim + d * WIDE + column % WIDE);
}
#endif
