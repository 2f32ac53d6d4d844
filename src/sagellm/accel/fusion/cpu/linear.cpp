// y = x W^T + bias for weights that stay in the number format of their checkpoint: float32, bfloat16 or float16.
// Sums are float32, and so are x and y, but where the CPU multiplies bfloat16: there x and y may be bfloat16. The
// instruction set is the one that the compiler is told to use. No exception leaves the C interface.

#include "few_rows.h"
#include "many_rows.h"

enum Outcome : int32_t { DONE = 0, NO_MEMORY = 1, NO_KERNEL = 2 };

// All else is hidden, so that libraries for two levels in one process share nothing.
#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// For other libraries.
EXPORTED threads::Together sagellm_threads() { return threads::shared(); }

// For few rows, where reading the weight is what costs.
EXPORTED int32_t sagellm_linear_few(const Linear *job, int32_t threads) {
    if (job->rows <= 0 || job->outputs <= 0) return DONE;
#if defined(__AVX512BF16__)
    if (job->x_type == BFLOAT16 && job->weight_type == BFLOAT16)
        return few_rows::run<Pairs, BFloat16>(*job, threads) ? DONE : NO_MEMORY;
#endif
    if (job->x_type != FLOAT32) return NO_KERNEL;
    switch (job->weight_type) {
        case FLOAT32: return few_rows::run<Floats<float>, float>(*job, threads) ? DONE : NO_MEMORY;
        case BFLOAT16: return few_rows::run<Floats<BFloat16>, float>(*job, threads) ? DONE : NO_MEMORY;
        case FLOAT16: return few_rows::run<Floats<Float16>, float>(*job, threads) ? DONE : NO_MEMORY;
        default: return NO_KERNEL;
    }
}

// The same for more rows. Weights in float32 are left to the BLAS, which has nothing to widen.
EXPORTED int32_t sagellm_linear_many(const Linear *job, int32_t threads) {
    if (job->rows <= 0 || job->outputs <= 0) return DONE;
    if (job->x_type != FLOAT32) return NO_KERNEL;
    switch (job->weight_type) {
        case BFLOAT16: return many_rows::run<Floats<BFloat16>>(*job, threads) ? DONE : NO_MEMORY;
        case FLOAT16: return many_rows::run<Floats<Float16>>(*job, threads) ? DONE : NO_MEMORY;
        default: return NO_KERNEL;
    }
}

}  // extern "C"
