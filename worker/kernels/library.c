/* What library.py calls: the choice of an instruction set, and the kernels of the one chosen. */
#include "kernels.h"

#include <string.h>

static const struct kernels *chosen = &kernels_generic;

int millrace_version(void)
{
    return MILLRACE_KERNELS_VERSION;
}

/* Return whether this machine has an instruction set: "generic", "avx2", "avx512" or "avx512bf16". */
int millrace_supports(const char *name)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (strcmp(name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (strcmp(name, "avx512bf16") == 0 && !__builtin_cpu_supports("avx512bf16"))
        return 0;
    if (strncmp(name, "avx512", 6) == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return strcmp(name, "generic") == 0;
}

/* Use an instruction set from now on. The machine must support it. */
void millrace_choose(const char *name)
{
    chosen = &kernels_generic;
#if defined(__x86_64__)
    if (strcmp(name, "avx2") == 0)
        chosen = &kernels_avx2;
    if (strcmp(name, "avx512") == 0)
        chosen = &kernels_avx512;
    if (strcmp(name, "avx512bf16") == 0)
        chosen = &kernels_avx512bf16;
#else
    (void)name;
#endif
}

int millrace_attend(const struct attention *call)
{
    return chosen->attend(call);
}

void millrace_argmax(const float *logits, int64_t num_rows, int64_t vocab_size, float *peaks, int64_t *token_ids,
                     int64_t num_threads)
{
    chosen->argmax(logits, num_rows, vocab_size, peaks, token_ids, num_threads);
}

int millrace_draw(const struct draws *call)
{
    return chosen->draw(call);
}

int millrace_linear(const struct linear *call)
{
    return chosen->linear(call);
}

int millrace_linear_argmax(const struct linear *call)
{
    return chosen->linear_argmax(call);
}

void millrace_pack(const struct packing *call)
{
    chosen->pack(call);
}

int millrace_panel_outputs(void)
{
    return chosen->panel_outputs;
}

void millrace_norm(const struct norm *call)
{
    chosen->norm(call);
}

void millrace_gate(const struct gate *call)
{
    chosen->gate(call);
}
