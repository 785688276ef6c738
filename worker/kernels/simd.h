/* Vectors of LANES floats, in the vector extensions of GCC and Clang: the compiler chooses the instructions.
 *
 * isa_*.c defines LANES before it includes this file. C has no `?:` for vectors, so `pick` does it with masks, which
 * compilers turn into blends. NaN must survive all of these functions: a row with a NaN is reported by the sampler. */
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16") /* so that vectors in arrays stay in registers */

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef int16_t vh __attribute__((vector_size(LANES * 4)));
typedef int8_t vb __attribute__((vector_size(LANES * 4)));
typedef int16_t vs __attribute__((vector_size(LANES * 2)));

static inline vf load(const float *from)
{
    vf loaded; /* memcpy: the address need not be aligned */
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

static inline void store(float *to, vf stored)
{
    memcpy(to, &stored, sizeof stored);
}

static inline vf splat(float number)
{
    return number - (vf){0};
}

/* Copy 4 bytes into every lane. */
static inline vi splat_bits(const void *from)
{
    int32_t bits;
    memcpy(&bits, from, sizeof bits);
    return (vi){0} + bits;
}

/* Lane by lane: add the products of two pairs of 16-bit integers to a sum of 32 bits. */
static inline vi add_products(vi sums, vi a, vi b)
{
#if HAS_BF16_PAIRS
    return (vi)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif LANES == 16
    return sums + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif LANES == 8
    return sums + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sums + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

/* 0, 1, 2, ... */
static inline vi first_ints(void)
{
    vi ints;
    for (int i = 0; i < LANES; i++)
        ints[i] = i;
    return ints;
}

/* Lane by lane: `a` where the mask is -1, `b` where it is 0. */
static inline vf pick(vi mask, vf a, vf b)
{
    return (vf)((mask & (vi)a) | (~mask & (vi)b));
}

/* If one is NaN, `b`. As are the instructions of x86-64, which GCC does not find itself. */
#if LANES == 16
#define FASTER(operation, slower) (vf)_mm512_##operation##_ps((__m512)a, (__m512)b)
#elif LANES == 8
#define FASTER(operation, slower) (vf)_mm256_##operation##_ps((__m256)a, (__m256)b)
#else
#define FASTER(operation, slower) slower
#endif
static inline vf larger(vf a, vf b)
{
    return FASTER(max, pick(a > b, a, b));
}

static inline vf lesser(vf a, vf b)
{
    return FASTER(min, pick(a < b, a, b));
}

/* a * b + c, rounded once where there is an instruction for it. */
static inline vf multiply_add(vf a, vf b, vf c)
{
#if LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline float largest_lane(vf lanes)
{
    float largest = lanes[0];
    for (int i = 1; i < LANES; i++)
        largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}

static inline float sum_of_lanes(vf lanes)
{
    float sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += lanes[i];
    return sum;
}

/* exp with a relative error of about 1e-7. Below -87 the result is about 1e-38 instead of a denormal or 0. */
static inline vf v_exp(vf x)
{
    x = lesser(splat(88.0f), larger(splat(-87.0f), x));
    /* x = n * ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer, which is in the low bits. */
    const vf rounder = splat(12582912.0f);
    vf shifted = x * splat(1.44269504f) + rounder;
    vf n = shifted - rounder;
    vf r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f); /* ln 2 in two parts: the first is exact */
    /* Taylor's series to r^7: its error is below half a unit in the last place. */
    vf p = splat(1.0f / 5040);
    p = p * r + splat(1.0f / 720);
    p = p * r + splat(1.0f / 120);
    p = p * r + splat(1.0f / 24);
    p = p * r + splat(1.0f / 6);
    p = p * r + splat(0.5f);
    p = p * r + splat(1.0f);
    p = p * r + splat(1.0f);
    vi exponent = ((vi)shifted - (vi)rounder + 127) << 23; /* the float 2^n */
    return p * (vf)exponent;
}

static inline vf v_tanh(vf x)
{
    return splat(1.0f) - splat(2.0f) / (v_exp(x + x) + splat(1.0f));
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

/* Exchange the second and the third lane of each four. */
static inline vi swap_middle(vi v)
{
#if LANES == 16
    return SHUFFLE(v, v, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
#elif LANES == 8
    return SHUFFLE(v, v, 0, 2, 1, 3, 4, 6, 5, 7);
#else
    return SHUFFLE(v, v, 0, 2, 1, 3);
#endif
}

/* In groups of 2 * half lanes: the first half from `a`, the second from `b`. FROM chooses which half of theirs. */
#define LANE(i, half, from) ((i) / (2 * (half)) * 2 * (half) + (i) % (half) + (from) + ((i) / (half) % 2) * LANES)
#define LANES_4(i, half, from) LANE(i, half, from), LANE(i + 1, half, from), LANE(i + 2, half, from), LANE(i + 3, half, from)
#if LANES == 16
#define ALL_LANES(half, from) \
    LANES_4(0, half, from), LANES_4(4, half, from), LANES_4(8, half, from), LANES_4(12, half, from)
#elif LANES == 8
#define ALL_LANES(half, from) LANES_4(0, half, from), LANES_4(4, half, from)
#else
#define ALL_LANES(half, from) LANES_4(0, half, from)
#endif
#define ADD_HALVES(half) \
    for (int i = 0; i < half; i++) \
        v[i] = SHUFFLE(v[i], v[i + half], ALL_LANES(half, 0)) + SHUFFLE(v[i], v[i + half], ALL_LANES(half, half))

/* Return the sums of LANES vectors: lane i is the sum of v[i]'s lanes. Each line halves the number of vectors. */
static inline vf sums_of_lanes(vf v[LANES])
{
#if LANES == 16
    UNROLLED ADD_HALVES(8);
#endif
#if LANES >= 8
    UNROLLED ADD_HALVES(4);
#endif
    UNROLLED ADD_HALVES(2);
    UNROLLED ADD_HALVES(1);
    return v[0];
}

#if HAS_TILES
#define SWAP_HALVES(half) \
    for (int i = 0; i < LANES; i++) \
        if (!(i & half)) { \
            vi first = v[i], second = v[i + half]; \
            v[i] = SHUFFLE(first, second, ALL_LANES(half, 0)); \
            v[i + half] = SHUFFLE(first, second, ALL_LANES(half, half)); \
        }

/* Exchange rows and lanes. */
static inline void transpose(vi v[LANES])
{
    UNROLLED SWAP_HALVES(8)
    UNROLLED SWAP_HALVES(4)
    UNROLLED SWAP_HALVES(2)
    UNROLLED SWAP_HALVES(1)
}
#endif

/* bfloat16 is the upper half of a float32. */
static inline float from_bf16(uint16_t number)
{
    uint32_t bits = (uint32_t)number << 16;
    float widened;
    memcpy(&widened, &bits, sizeof widened);
    return widened;
}

/* Widen LANES numbers. */
static inline vf load_bf16(const uint16_t *from)
{
#if LANES == 16
    return (vf)(vi)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif LANES == 8
    return (vf)(vi)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    return (vf)((vi){from[0], from[1], from[2], from[3]} << 16);
#endif
}

/* Widen LANES numbers, or fewer and zeros. */
static inline vf load_some(const void *from, int64_t offset, int64_t dtype, int64_t count)
{
    if (count < LANES) {
        uint32_t some[LANES] = {0};
        int64_t size = dtype == FLOAT32 ? 4 : 2;
        memcpy(some, (const char *)from + offset * size, count * size);
        return dtype == FLOAT32 ? load((const float *)some) : load_bf16((const uint16_t *)some);
    }
    return dtype == FLOAT32 ? load((const float *)from + offset) : load_bf16((const uint16_t *)from + offset);
}

/* Store the first `count` lanes, at most all. */
static inline void store_some(float *to, vf stored, int64_t count)
{
    memcpy(to, &stored, count < LANES ? count * sizeof(float) : sizeof stored);
}

/* Round to nearest, ties to even. A NaN stays one. */
static inline uint16_t to_bf16(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return number == number ? (uint16_t)rounded : 0x7fc0;
}

static inline float item(const void *from, int64_t offset, int64_t dtype)
{
    return dtype == FLOAT32 ? ((const float *)from)[offset] : from_bf16(((const uint16_t *)from)[offset]);
}

static inline void put(void *to, int64_t at, float number, int64_t dtype)
{
    if (dtype == FLOAT32)
        ((float *)to)[at] = number;
    else
        ((uint16_t *)to)[at] = to_bf16(number);
}

static inline int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t padded(int64_t size)
{
    return (size + LANES - 1) / LANES * LANES;
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
