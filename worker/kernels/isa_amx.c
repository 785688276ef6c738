/* The kernels for x86-64 with AVX-512 F, BW, DQ, VL, BF16 and VNNI, and AMX for bfloat16 and int8. */
#include "kernels.h"
#if HAS_AMX_COMPILER
#define LANES 16
#define HAS_BF16_PAIRS 1
#define HAS_TILES 1
#define TABLE kernels_amx
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,fma,amx-tile,amx-bf16,amx-int8"
#include "isa.inc.h"
#endif
