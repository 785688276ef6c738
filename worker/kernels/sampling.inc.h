/* Row argmax, and random draws in one pass: the rules are those of sampler.py and counter_rng.py. */

enum {
    HALVINGS = 12,     /* of the range in which a floor is searched; few entries are left to sort then */
    PART = 16 * LANES, /* entries whose sum is made in float32; sums of more would lose digits */
    HALF = LANES / 2,
};

static const float NEGLIGIBLE = -40.0f; /* exp of this times any vocabulary is lost in the rounding of a sum that is >= 1 */

typedef uint64_t vu __attribute__((vector_size(LANES * 4))); /* HALF lanes */

static inline int any_lane(vi mask)
{
#if LANES == 16
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif LANES == 8
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

/* --- argmax --- */

/* What is known of a row: lane by lane the largest number, the first id that has it, and whether one is NaN. */
struct leader {
    vf best;
    vi ids, has_nan;
};

#define NO_LEADER {splat(-INFINITY), {0}, {0}}

static inline void compare(struct leader *leader, vf x, vi ids)
{
    vi is_better = x > leader->best; /* not >=: of equal numbers the first wins */
    leader->best = pick(is_better, x, leader->best);
    leader->ids = (is_better & ids) | (~is_better & leader->ids);
    leader->has_nan |= x != x;
}

/* Find the row's largest number in the threads' parts. */
static void find_leader(const struct leader *leaders, int64_t num_parts, int64_t stride, float *peak, int64_t *token_id)
{
    int is_nan = 0;
    *peak = -INFINITY;
    *token_id = 0;
    for (int64_t part = 0; part < num_parts; part++, leaders += stride) {
        is_nan |= any_lane(leaders->has_nan);
        for (int lane = 0; lane < LANES; lane++)
            if (leaders->best[lane] > *peak || (leaders->best[lane] == *peak && leaders->ids[lane] < *token_id)) {
                *peak = leaders->best[lane];
                *token_id = leaders->ids[lane];
            }
    }
    if (is_nan)
        *peak = NAN;
}

/* Replace those of LANES numbers whose bit is not set with -inf. */
static inline void exclude(float *numbers, uint32_t bits)
{
    vi is_allowed = -(((vi){0} + (int32_t)bits) >> first_ints() & 1);
    store(numbers, pick(is_allowed, load(numbers), splat(-INFINITY)));
}

static void argmax(float *logits, const uint8_t *const *masks, int64_t num_rows, int64_t vocab_size, float *peaks,
                   int64_t *token_ids, int64_t num_threads)
{
    struct region region = begin_region(4 * num_rows * vocab_size, smaller(num_rows, num_threads));
#pragma omp parallel for schedule(static) num_threads(region.num_threads)
    for (int64_t row = 0; row < num_rows; row++) {
        float *own = logits + row * vocab_size;
        const uint8_t *mask = masks ? masks[row] : NULL;
        struct leader leader = NO_LEADER;
        vi ids = first_ints();
        int64_t i = 0;
        for (; i + LANES <= vocab_size; i += LANES, ids += LANES) {
            if (mask)
                exclude(own + i, (mask[i / 8] | mask[(i + LANES - 1) / 8] << 8) >> i % 8);
            compare(&leader, load(own + i), ids);
        }
        for (; i < vocab_size; i++, ids += 1) { /* the first lane has the id i */
            if (mask && !(mask[i / 8] >> i % 8 & 1))
                own[i] = -INFINITY;
            compare(&leader, pick(first_ints() < 1, splat(own[i]), splat(-INFINITY)), ids);
        }
        find_leader(&leader, 1, 0, peaks + row, token_ids + row);
    }
    end_region(region);
}

/* --- floors of top_k and top_p --- */

struct entry {
    float scaled, mass;
};

/* What one thread works with while it draws for a row. */
struct draw_scratch {
    float *scaled;         /* [V], (logit - peak) / temperature: at most 0 */
    float *masses;         /* [V], exp(scaled) */
    struct entry *entries; /* [V], those that are sorted */
};

static int compare_entries(const void *a, const void *b)
{
    float x = ((const struct entry *)a)->scaled, y = ((const struct entry *)b)->scaled;
    return (x < y) - (x > y); /* the largest first */
}

/* Return the sum of the masses of entries that are `low` or larger. */
static double mass_from(const struct draw_scratch *s, int64_t vocab_size, float low)
{
    double total = 0;
    int64_t i = 0;
    for (; i + PART <= vocab_size; i += PART) {
        vf sum = {0};
        for (int64_t j = i; j < i + PART; j += LANES)
            sum += pick(load(s->scaled + j) >= splat(low), load(s->masses + j), splat(0.0f));
        total += sum_of_lanes(sum);
    }
    for (; i < vocab_size; i++)
        total += s->scaled[i] >= low ? s->masses[i] : 0.0f;
    return total;
}

/* Collect the entries in [low, high). Return their number. */
static int64_t collect_entries(struct draw_scratch *s, int64_t vocab_size, float low, float high)
{
    int64_t count = 0;
    for (int64_t i = 0; i < vocab_size; i += LANES) {
        if (i + LANES <= vocab_size) {
            vf scaled = load(s->scaled + i);
            if (!any_lane((scaled >= splat(low)) & (scaled < splat(high))))
                continue;
        }
        for (int64_t j = i; j < i + LANES && j < vocab_size; j++)
            if (s->scaled[j] >= low && s->scaled[j] < high)
                s->entries[count++] = (struct entry){s->scaled[j], s->masses[j]};
    }
    return count;
}

/* Return the largest entry such that it and the larger ones have a mass of `target`; `low` if all from there have less.
 * The range that contains it is halved, then its entries are sorted. */
static float entry_reaching(struct draw_scratch *s, int64_t vocab_size, float low, double target)
{
    double reached = mass_from(s, vocab_size, 0.0f);
    if (reached >= target)
        return 0.0f;
    float high = 0.0f; /* the mass from `high` on is below the target */
    for (int i = 0; i < HALVINGS; i++) {
        float middle = low + (high - low) / 2;
        double mass = mass_from(s, vocab_size, middle);
        if (mass >= target) {
            low = middle;
        } else {
            high = middle;
            reached = mass;
        }
    }
    int64_t count = collect_entries(s, vocab_size, low, high);
    qsort(s->entries, count, sizeof(struct entry), compare_entries);
    for (int64_t i = 0; i < count; i++) {
        reached += s->entries[i].mass;
        if (reached >= target)
            return s->entries[i].scaled;
    }
    return low;
}

static float top_k_floor(struct draw_scratch *s, int64_t vocab_size, int64_t top_k, float floor)
{
    const float farthest = -64.0f; /* farther ones are hardly ever among the first k */
    float low = floor > farthest ? floor : farthest;
    for (int64_t i = 0; i < vocab_size; i++)
        s->masses[i] = 1.0f;
    float kth = entry_reaching(s, vocab_size, low, (double)top_k);
    if (kth > low || floor >= farthest)
        return kth;
    int64_t count = collect_entries(s, vocab_size, -INFINITY, INFINITY);
    qsort(s->entries, count, sizeof(struct entry), compare_entries);
    return s->entries[top_k - 1].scaled > floor ? s->entries[top_k - 1].scaled : floor;
}

/* Fill the masses of entries that reach the floor; the others have none. Return the sum. */
static double fill_masses(struct draw_scratch *s, int64_t vocab_size, float floor)
{
    double total = 0;
    int64_t i = 0;
    while (i + LANES <= vocab_size) {
        vf sum = {0};
        for (int64_t end = i + PART; i < end && i + LANES <= vocab_size; i += LANES) {
            vf scaled = load(s->scaled + i), masses = {0};
            vi is_counted = scaled >= splat(floor);
            if (any_lane(is_counted))
                masses = (vf)(is_counted & (vi)v_exp(scaled));
            store(s->masses + i, masses);
            sum += masses;
        }
        total += sum_of_lanes(sum);
    }
    for (; i < vocab_size; i++)
        total += s->masses[i] = s->scaled[i] >= floor ? expf(s->scaled[i]) : 0.0f;
    return total;
}

/* --- draws --- */

static inline vu mix64(vu bits)
{
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
}

static const uint64_t GOLDEN_GAMMA = 0x9E3779B97F4A7C15u;

/* Return the scaled logit minus the logarithm of the token's exponential variate, rounded as counter_rng.py does. */
static float score_token(float scaled, uint64_t row_key, int64_t token_id)
{
    uint64_t bits = mix64((vu){0} + (row_key + (uint64_t)(token_id + 1) * GOLDEN_GAMMA))[0];
    float uniform = ((float)(int64_t)(bits >> 11) + 0.5f) * 0x1p-53f;
    uniform = uniform < 1.0f - 0x1p-24f ? uniform : 1.0f - 0x1p-24f;
    return scaled - logf(-log1pf(-uniform));
}

/* Return the upper 31 bits of LANES tokens' random bits as floats in [0, 2^31], beginning with the increments given. */
static inline vf uniforms(uint64_t state, const vu *increments)
{
    vi low = (vi)mix64(increments[0] + state), high = (vi)mix64(increments[1] + state);
#if LANES == 16
    vi upper = SHUFFLE(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif LANES == 8
    vi upper = SHUFFLE(low, high, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    vi upper = SHUFFLE(low, high, 1, 3, 5, 7);
#endif
    return __builtin_convertvector(upper >> 1 & 0x7fffffff, vf);
}

/* Return the token with the best score among those that reach the floor; of equal scores the lowest id.
 *
 * Most tokens are refused without a logarithm. With the exponential variate E = -log(1 - u) >= u, a score above `best`
 * needs u < exp(scaled - best) = 2^y, and 2^y <= (1 + fraction of y) * 2^(whole part of y), which is the float with the
 * bits (y + 127) * 2^23. A small margin covers the rounding. All is times 2^31, as the uniforms are. */
static int64_t best_token(const float *scaled, int64_t vocab_size, float floor, uint64_t row_key, int64_t first_guess)
{
    int64_t best_id = first_guess;
    float best = score_token(scaled[first_guess], row_key, first_guess);
    const float log2e = 1.44269504f * 0x1p23f;
    float offset = (127 + 31 + 2e-4f) * 0x1p23f - best * log2e;
    vu increments[2];
    for (int i = 0; i < HALF; i++) {
        increments[0][i] = (uint64_t)(i + 1) * GOLDEN_GAMMA;
        increments[1][i] = (uint64_t)(i + 1 + HALF) * GOLDEN_GAMMA;
    }
    for (int64_t i = 0; i < vocab_size; i += LANES) {
        int64_t count = vocab_size - i < LANES ? vocab_size - i : LANES;
        vi candidates = ~(vi){0};
        if (count == LANES) {
            vf x = load(scaled + i);
            candidates = x >= splat(floor);
            if (!any_lane(candidates))
                continue;
            vf bits = x * splat(log2e) + splat(offset);
            bits = lesser(splat((127 + 31 + 1) * 0x1p23f), larger(splat(0x1p23f), bits));
            vf bound = (vf)__builtin_convertvector(bits, vi);
            candidates &= uniforms(row_key + (uint64_t)i * GOLDEN_GAMMA, increments) < bound;
            if (!any_lane(candidates))
                continue;
        }
        for (int lane = 0; lane < count; lane++) {
            if (!candidates[lane] || !(scaled[i + lane] >= floor))
                continue;
            float score = score_token(scaled[i + lane], row_key, i + lane);
            if (score > best || (score == best && i + lane < best_id)) {
                best = score;
                best_id = i + lane;
                offset = (127 + 31 + 2e-4f) * 0x1p23f - best * log2e;
            }
        }
    }
    return best_id;
}

static void draw_row(const struct draws *c, struct draw_scratch *s, int64_t row)
{
    if (c->temperatures[row] == 0 || !isfinite(c->peaks[row]))
        return;
    float temperature = fmaxf(c->temperatures[row], 0x1p-126f), floor = c->floors[row];
    for (int64_t i = 0; i < c->vocab_size; i++)
        s->scaled[i] = (c->logits[row * c->vocab_size + i] - c->peaks[row]) / temperature;
    if (c->top_k[row] > 0 && c->top_k[row] < c->vocab_size)
        floor = top_k_floor(s, c->vocab_size, c->top_k[row], floor);
    int64_t peak_id = c->token_ids[row];
    double target = 0;
    if (c->top_p[row] < 1.0) {
        double total = fill_masses(s, c->vocab_size, fmaxf(floor, NEGLIGIBLE));
        target = c->top_p[row] * total;
        /* V entries below this one have less than (1 - top_p) of the total. */
        floor = fmaxf(floor, (float)log(fmax((total - target) / (double)c->vocab_size, 1e-30)) - 0.01f);
    }
    int64_t token_id = best_token(s->scaled, c->vocab_size, floor, c->row_keys[row], peak_id);
    /* The token drawn is mostly one that top_p leaves, also without its floor. The mass of larger ones tells. */
    float drawn = s->scaled[token_id];
    if (c->top_p[row] < 1.0 && drawn < 0 && mass_from(s, c->vocab_size, nextafterf(drawn, 0)) >= target) {
        floor = entry_reaching(s, c->vocab_size, floor, target);
        token_id = best_token(s->scaled, c->vocab_size, floor, c->row_keys[row], peak_id);
    }
    c->token_ids[row] = token_id;
}

static int draw(const struct draws *c)
{
    int num_threads = (int)smaller(c->num_rows, c->num_threads);
    size_t floats_per_thread = (2 + sizeof(struct entry) / sizeof(float)) * c->vocab_size;
    float *memory = malloc(sizeof(float) * floats_per_thread * num_threads);
    if (memory == NULL)
        return -1;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int64_t row = 0; row < c->num_rows; row++) {
        float *own = memory + floats_per_thread * omp_get_thread_num();
        struct draw_scratch s = {own, own + c->vocab_size, (struct entry *)(own + 2 * c->vocab_size)};
        draw_row(c, &s, row);
    }
    free(memory);
    return 0;
}
