/* The interface of Millrace's CPU kernels: a table of them for each instruction set.
 *
 * Each kernel is written once with the vector types of simd.h and compiled once for each instruction set (isa_*.c).
 * All sizes and strides count elements. Offsets into the KV pool are 64-bit: a pool may exceed 2^31 elements. */
#ifndef MILLRACE_KERNELS_H
#define MILLRACE_KERNELS_H

#include <stdint.h>

/* Raise this with every change to this file. library.py refuses a library of another version. */
#define MILLRACE_KERNELS_VERSION 24

/* Of weights: from CODES_4 on see codes.inc.h. */
enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, CODES_4 = 3, CODES_8 = 4, FLOATS_8 = 5 };
enum { SILU = 0, GELU_TANH = 1 };
enum { DELTA_RULE = 0, STATE_SPACE = 1, CONVOLUTION = 2 };

/* The rows of one step. Shapes: R rows, T tokens of all rows one after the other, P blocks in a table row. */
struct attention_rows {
    const int32_t *query_starts; /* [R + 1], offsets into the T tokens */
    const int32_t *kv_lens;      /* [R], tokens of the sequence in the pool, those of this step included */
    const int32_t *block_tables; /* [R, P] */
    int64_t num_rows, table_width;
    int64_t num_threads;
    /* These are filled by order_rows. */
    int64_t num_decodes;   /* rows of one token */
    const int32_t *order;  /* [R], of the rows: those of one token first, sorted by their tables */
    const int32_t *common; /* [num_decodes], positions that a row and the next one in the order have in the same slots */
};

/* Paged attention of one layer. Shapes besides those above: Hq query heads, Hkv key and value heads, D and Dv sizes of a
 * key and a value head, N blocks of S tokens.
 *
 * Queries and keys are normalized if there are weights, then rotated if there are tables. With x1 the first and x2 the
 * second half of the first `rotary_dim` elements: (x1 * cos - x2 * sin, x2 * cos + x1 * sin). */
struct attention {
    const struct attention_rows *rows;
    int64_t num_heads, num_kv_heads, key_dim, value_dim, block_size;
    int64_t dtype;      /* of qkv and output */
    int64_t pool_dtype; /* of keys and values */
    int64_t rounds;     /* 1: many query vectors may be rounded to bfloat16, with their weights, if all is bfloat16 */
    int64_t window; /* a token attends to its last `window` positions; 0: to all */
    float scaling, softcap; /* softcap 0: none */
    const float *query_norm, *key_norm; /* [D], weights of RMSNorm, or NULL */
    float norm_eps;
    int64_t rotary_dim;           /* even, at most D */
    const float *cosines, *sines; /* [positions, rotary_dim / 2], or NULL */
    const void *qkv; /* [T, Hq * D + Hkv * D + Hkv * Dv], contiguous: queries, keys and values of a token, each by heads */
    void *keys;   /* [N, S, Hkv, D], contiguous */
    void *values; /* [N, S, Hkv, Dv], contiguous */
    void *output; /* [T, Hq, Dv], contiguous */
    const float *sinks; /* [Hq], of each head one more score, which has no key and no value; or NULL */
};

/* Random draws. Shapes: M rows, V token ids. */
struct draws {
    const float *logits; /* [M, V], contiguous */
    int64_t num_rows, vocab_size;
    const float *peaks;        /* [M], the rows' largest logits */
    const float *temperatures; /* [M], 0: the row is not drawn */
    const float *floors;       /* [M], log(min_p) */
    const int64_t *top_k;      /* [M], 0: no limit */
    const double *top_p;       /* [M], 1: no limit */
    const int64_t *row_keys;   /* [M], as in counter_rng.py */
    int64_t *token_ids;        /* [M], before: those of the peaks; after: those drawn */
    int64_t num_threads;
};

/* A linear layer. Shapes: M rows, N outputs, K inputs. Panels: see linear.inc.h. */
struct linear {
    const void *input;      /* [M, K], contiguous */
    void *output;           /* [M, N], contiguous. NULL: the argmax of each row's outputs instead */
    float *peaks;           /* [M], of the argmax, which */
    int64_t *token_ids;     /* [M] */
    const uint8_t *allowed; /* [M, panels, PANEL_OUTPUTS / 8] and 8 bytes: a bit for each output; NULL: all are allowed */
    int64_t num_rows, accumulates, num_threads;
    const void *panels;
    const float *weight_scales; /* of int8: for each output, up to whole panels: its weights are byte * scale */
    const float *bias;   /* [N], or NULL */
    const void *rounded; /* for the argmax without bias: the panels in int8, or NULL, */
    const float *scales; /* for each panel: its weights are byte * scale, */
    const float *errors; /* and the most that its outputs differ then, for inputs of length 1 in 15 bits */
    int64_t num_outputs, num_inputs;
    int64_t weight_dtype, input_dtype, output_dtype; /* sums are float32 */
    /* Of codes, whose K is a multiple of 8: */
    const float *code_table;  /* [16], the numbers of codes of 4 bits */
    const float *code_scales; /* [panels, groups, PANEL_OUTPUTS] */
    const float *code_zeros;  /* the same, or NULL */
    const int32_t *groups;    /* [K], the group of each input */
    int64_t num_groups;
    int64_t by_group; /* 1: there is one group, or all have as many inputs, in their order: a multiple of 64 */
    int64_t rounds;   /* 1: inputs are rounded to 15 bits, as with int8. Besides, codes are integers, those of 8 bits without zero
                         points */
};

/* RMSNorm (Zhang, Sennrich: Root Mean Square Layer Normalization, 2019). Shapes: M rows, K entries in each. */
struct norm {
    const void *input;    /* [M, K] */
    const float *weights; /* [K] */
    void *output;         /* [M, K]; it may be the input */
    int64_t num_rows, size;
    int64_t dtype; /* of input and output */
    int64_t adds;  /* 1: add the result to what is in the output */
    int64_t num_threads;
    float epsilon;
};

/* activation(gate) * value. Shapes: M rows, K outputs in each. */
struct gate {
    const void *input; /* [M, 2 K]: the gates, then the values */
    void *output;      /* [M, K] */
    int64_t num_rows, size, dtype, activation, num_threads;
};

/* A recurrent layer between its projections. Shapes: R rows, T tokens of all rows one after the other, W outputs of the
 * projection for a token, C channels of the convolution, S sequences, Hk key and query heads, Hv value heads, D and Dv sizes
 * of a key and a value.
 *
 * A token's channels are convolved with those of the `num_taps` - 1 tokens before it, and pass SiLU. They are the token's
 * queries q, keys k and values v. Each head has a state Z [D, Dv]. With step = softplus(steps + step_bias):
 *
 *   DELTA_RULE    Z = exp(rate * step) * Z,  Z = Z + k (v - k Z) * gain * sigmoid(gains), with q and k of length 1, and
 *                 q / sqrt(D) (Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024)
 *   STATE_SPACE   Z = exp(rate * step) * Z,  Z = Z + k v * step (Dao, Gu: Transformers are SSMs, 2024)
 *
 * The result is q Z + skip * v, of all heads, normalized and multiplied by SiLU(gates).
 *
 *   CONVOLUTION   only that, of channels * factors, without SiLU. The result is multiplied by the gates. */
struct recurrence {
    const int32_t *query_starts; /* [R + 1], offsets into the T tokens */
    const int32_t *slots;        /* [R], of the rows' sequences */
    const uint8_t *is_new;       /* [R], 1: the row begins its sequence, whose state is zero */
    int64_t num_rows, num_threads;
    int64_t rule, dtype; /* dtype: of input and output */
    int64_t rounds;      /* 1: what is multiplied of many tokens may be rounded to bfloat16, if dtype is that */
    const void *input;   /* [T, W], contiguous */
    void *output;        /* [T, Hv * Dv], or [T, C] */
    int64_t width;       /* W */
    int64_t conv_at, factor_at, gate_at, step_at, gain_at; /* where these begin in a token's input */
    int64_t query_at, key_at, value_at;                    /* and these in its channels */
    int64_t num_channels, num_taps;                        /* at most 8 taps */
    int64_t num_key_heads, num_heads, key_dim, value_dim;
    int64_t state_dim;        /* Dv, up to a multiple of 16 */
    const float *conv_weights; /* [num_taps, C] */
    const float *conv_bias;    /* [C], or NULL */
    float *conv_states;        /* [S, num_taps - 1, C] */
    float *states;             /* [S, Hv, state_dim * D], in an order of the kernels' own */
    const float *rates, *step_bias; /* [Hv] */
    const float *skips;             /* [Hv], or NULL */
    const float *norm_weights;      /* [Hv * Dv], of RMSNorm, or NULL */
    int64_t norm_size;              /* entries that are normalized together */
    int64_t gates_first;            /* 1: gates before the norm */
    float gain, epsilon;
};

/* Weights [N, K], contiguous, and where they are in panels. */
struct packing {
    void *weights;
    void *panels;
    float *scales;             /* the `weight_scales` of panels of int8, which pack fills; NULL: panels of the same dtype */
    const int64_t *output_ids; /* [N], for unpack */
    int64_t first_output, num_outputs, num_inputs, dtype, num_threads; /* dtype: of the weights */
};

struct kernels {
    /* Write the step's keys and values into the pool, then attend. Return 0, or -1 if there is no memory. */
    int (*attend)(const struct attention *call);
    /* Find the largest logit of each row and the lowest id that has it. A NaN makes the row's peak NaN. With `masks`: for
     * each row NULL, or a bit for each id. Logits of ids whose bit is 0 become -inf before. */
    void (*argmax)(float *logits, const uint8_t *const *masks, int64_t num_rows, int64_t vocab_size, float *peaks,
                   int64_t *token_ids, int64_t num_threads);
    /* Draw a token for each row with a temperature and a finite peak. Return 0, or -1 if there is no memory. */
    int (*draw)(const struct draws *call);
    /* Write the output of a linear layer, or with `accumulates` add it; without an output find the argmax of the allowed
     * ones. A row's result does not depend on the other rows. Return 0, or -1 if there is no memory. */
    int (*linear)(const struct linear *call);
    /* Pack weights as the outputs from `first_output` on of panels that are zero there. */
    void (*pack)(const struct packing *call);
    void (*unpack)(const struct packing *call); /* of the outputs `output_ids` */
    int panel_outputs; /* outputs of a panel of packed weights */
    void (*norm)(const struct norm *call);
    void (*gate)(const struct gate *call);
    /* Return 0, or -1 if there is no memory. A row's result does not depend on the other rows; without `rounds` neither on
     * how its tokens are divided over calls. */
    int (*recurrence)(const struct recurrence *call);
};

extern const struct kernels kernels_generic;
#if defined(__x86_64__)
extern const struct kernels kernels_avx2, kernels_avx512, kernels_avx512bf16;

/* Whether the compiler knows AMX, which a process of Linux has to ask for. */
#if defined(__x86_64__) && defined(__linux__)
#if (defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11)
#define HAS_AMX_COMPILER 1
extern const struct kernels kernels_amx;
#endif
#endif
#endif

#endif
