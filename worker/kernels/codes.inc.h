/* Weights as quantized checkpoints store them: codes of 4 or 8 bits, with a scale, and perhaps a zero point, for each group of
 * inputs of an output. A weight is (number of the code - zero point) * scale.
 *
 * A line of a panel has 4 bytes for each output:
 *
 *     CODES_4     [N / PANEL_OUTPUTS, K / 8, PANEL_OUTPUTS]: 8 codes, whose numbers are in a table. The first four are in the
 *                 lower halves of the bytes, the others in the upper ones
 *     CODES_8     [N / PANEL_OUTPUTS, K / 4, PANEL_OUTPUTS]: 4 signed integers
 *     FLOATS_8    [N / PANEL_OUTPUTS, K / 4, PANEL_OUTPUTS]: 4 float8 (e4m3)
 *
 * K is padded to a multiple of 64 with zeros. The scales and zero points are [N / PANEL_OUTPUTS, groups, PANEL_OUTPUTS].
 *
 * A span of a panel is widened, and then multiplied by all rows: to the weights, in float32 or bfloat16; or to the numbers, which
 * are exact in bfloat16 (float8) or in int8 (integers, if inputs are rounded). The scale then multiplies the sums of a group. */

/* Return the numbers of the i-th codes of a line, for LANES outputs. */
static ALWAYS_INLINE vf numbers_of(vi line, const int i, const int kind, const vf *table)
{
    if (kind == CODES_4) {
        vi codes = line >> (i < 4 ? 8 * i : 8 * i - 28);
#if LANES == 16
        return (vf)_mm512_permutexvar_ps((__m512i)codes, (__m512)table[0]);
#elif LANES == 8
        return (vf)_mm256_blendv_ps(_mm256_permutevar8x32_ps((__m256)table[0], (__m256i)codes),
                                    _mm256_permutevar8x32_ps((__m256)table[1], (__m256i)codes), (__m256)(codes << 28));
#else
        const float *entries = (const float *)table;
        return (vf){entries[codes[0] & 15], entries[codes[1] & 15], entries[codes[2] & 15], entries[codes[3] & 15]};
#endif
    }
    vi bytes = line << (24 - 8 * i) >> 24;
    if (kind == CODES_8)
        return __builtin_convertvector(bytes, vf);
    /* With its bits in their places in a float32, a float8 is 2^-120 times its number. The few below 2^-6 are denormal there. */
    return (vf)(bytes << 20 & (int32_t)0x87f00000) * splat(0x1p120f);
}

/* Store the weights of two inputs where the panel of such weights has them. */
static ALWAYS_INLINE void store_weights(float *to, vf first, vf second, const int is_pairs)
{
#if HAS_BF16_PAIRS
    if (is_pairs) {
        const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                               20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        store(to, (vf)_mm512_permutexvar_epi16(order, halves));
        return;
    }
#endif
    store(to, first);
    store(to + PANEL_OUTPUTS, second);
}

static ALWAYS_INLINE void widen_span(const struct linear *c, const float *line, int64_t panel, int64_t begin, int64_t size,
                                     const int kind, const int has_zeros, const int is_scaled, const int is_pairs, float *to)
{
    const int per_line = kind == CODES_4 ? 8 : 4;
    const float *scales = c->code_scales + panel * c->num_groups * PANEL_OUTPUTS;
    const float *zeros = has_zeros ? c->code_zeros + panel * c->num_groups * PANEL_OUTPUTS : NULL;
    vf table[LANES == 16 ? 1 : 16 / LANES];
    memcpy(table, c->code_table, sizeof table);
    for (int64_t k = begin; k < begin + size; k += per_line, line += PANEL_OUTPUTS)
        for (int v = 0; v < PANEL_VECTORS; v++) {
            vi codes = (vi)load(line + v * LANES);
            __builtin_prefetch(line + AHEAD + v * LANES, 0, 2);
            float *at = to + (k - begin) / (is_pairs ? 2 : 1) * PANEL_OUTPUTS + v * LANES;
            UNROLLED for (int i = 0; i < per_line; i += 2, at += (is_pairs ? 1 : 2) * PANEL_OUTPUTS) {
                int64_t first_at = c->groups[k + i] * PANEL_OUTPUTS + v * LANES;
                int64_t second_at = c->groups[k + i + 1] * PANEL_OUTPUTS + v * LANES;
                vf first = numbers_of(codes, i, kind, table), second = numbers_of(codes, i + 1, kind, table);
                if (has_zeros) {
                    first -= load(zeros + first_at);
                    second -= load(zeros + second_at);
                }
                if (is_scaled) {
                    first *= load(scales + first_at);
                    second *= load(scales + second_at);
                }
                store_weights(at, first, second, is_pairs);
            }
        }
}

#if HAS_BF16_PAIRS
/* Make pairs of bfloat16 of float8. */
static void widen_floats(const float *line, int64_t size, float *to)
{
    const vf small = __builtin_convertvector(first_ints(), vf) * splat(0x1p-9f); /* the numbers below 2^-6, by their low bits */
    const __m512i table = (__m512i)_mm512_cvtne2ps_pbh((__m512)small, (__m512)small);
    const __m512i first_of_four = _mm512_set4_epi32(12, 8, 4, 0);
    /* The first two bytes of four, and the last two, become the upper halves of 16 bits. */
    const __m512i order = _mm512_add_epi32(_mm512_mullo_epi32(first_of_four, _mm512_set1_epi32(0x01000100)),
                                           _mm512_set1_epi32(0x01800080));
    for (int64_t i = 0; i < size / 4 * PANEL_VECTORS; i++, line += LANES) {
        __m512i codes = (__m512i)load(line);
        __builtin_prefetch(line + AHEAD, 0, 2);
        /* They have no leading 1, and are rare. */
        int has_small = _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78)) != 0;
        float *at = to + (i / PANEL_VECTORS * 2 * PANEL_VECTORS + i % PANEL_VECTORS) * LANES;
        UNROLLED for (int pair = 0; pair < 2; pair++) {
            __m512i two = _mm512_shuffle_epi8(codes, _mm512_add_epi32(order, _mm512_set1_epi32(pair * 0x02000200)));
            __m512i in_place = _mm512_and_si512(_mm512_srai_epi16(two, 4), _mm512_set1_epi16((short)0x87f0));
            __m512i numbers = _mm512_add_epi16(in_place, _mm512_set1_epi16(120 << 7));
            if (has_small) {
                __mmask32 is_small = _mm512_testn_epi16_mask(two, _mm512_set1_epi16(0x7800));
                __m512i sizes = _mm512_permutexvar_epi16(_mm512_srli_epi16(in_place, 4), table);
                __m512i signs = _mm512_and_si512(two, _mm512_set1_epi16((short)0x8000));
                numbers = _mm512_mask_mov_epi16(numbers, is_small, _mm512_or_si512(sizes, signs));
            }
            store(at + pair * PANEL_OUTPUTS, (vf)numbers);
        }
    }
}
#endif

/* Widen inputs [begin, begin + size) of a panel, where `line` has them: to weights, or float8 to numbers, if not `is_scaled`. */
static __attribute__((noinline)) void widen_codes(const struct linear *c, const float *line, int64_t panel, int64_t begin,
                                                  int64_t size, int is_scaled, int is_pairs, float *to)
{
    int has_zeros = c->code_zeros != NULL;
#define WIDEN_SPAN(kind, has_zeros, is_pairs) \
    widen_span(c, line, panel, begin, size, kind, has_zeros, 1, HAS_BF16_PAIRS && is_pairs, to)
#define WIDEN_SPANS(kind) \
    if (is_pairs) \
        has_zeros ? WIDEN_SPAN(kind, 1, 1) : WIDEN_SPAN(kind, 0, 1); \
    else \
        has_zeros ? WIDEN_SPAN(kind, 1, 0) : WIDEN_SPAN(kind, 0, 0)
#if HAS_BF16_PAIRS
    if (!is_scaled && is_pairs) {
        widen_floats(line, size, to);
        return;
    }
#endif
    if (!is_scaled)
        widen_span(c, line, panel, begin, size, FLOATS_8, 0, 0, 0, to);
    else if (c->weight_dtype == CODES_4) {
        WIDEN_SPANS(CODES_4);
    } else if (c->weight_dtype == CODES_8) {
        WIDEN_SPANS(CODES_8);
    } else {
        WIDEN_SPANS(FLOATS_8);
    }
}

/* Make int8 of inputs of one group, of all panels': codes less zero points. */
static __attribute__((noinline)) void widen_to_bytes(const struct linear *c, const float *line, int64_t group, int64_t size,
                                                     float *to)
{
    for (int v = 0; v < PANEL_VECTORS; v++, line += LANES, to += LANES) {
        vf zeros = splat(-c->code_table[0]);
        if (c->code_zeros)
            zeros = load(c->code_zeros + group * PANEL_OUTPUTS + v * LANES);
        vb zero = (vb)((__builtin_convertvector(zeros, vi) & 255) * 0x01010101);
        for (int64_t i = 0; i < size / 8; i++) {
            vi codes = (vi)load(line + i * PANEL_OUTPUTS);
            __builtin_prefetch(line + AHEAD + i * PANEL_OUTPUTS, 0, 2);
            store(to + 2 * i * PANEL_OUTPUTS, (vf)((vb)(codes & 0x0f0f0f0f) - zero));
            store(to + (2 * i + 1) * PANEL_OUTPUTS, (vf)((vb)(codes >> 4 & 0x0f0f0f0f) - zero));
        }
    }
}
