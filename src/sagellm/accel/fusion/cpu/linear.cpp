// y = x W^T + bias for weights that stay in the number format of their checkpoint: float32, bfloat16 or float16.
// Sums are float32, and so are x and y, but where the CPU multiplies bfloat16: there x may be bfloat16, and y with
// it. The instruction set is the one that the compiler is told to use. No exception leaves the C interface.

#include "packed.h"
#include "replay.h"

enum Outcome : int32_t { DONE = 0, NO_MEMORY = 1, NO_KERNEL = 2, BAD_INDEX = 6 };

// All else is hidden, so that libraries for two levels in one process share nothing.
#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// For other libraries.
EXPORTED threads::Together sagellm_threads() { return threads::shared(); }

// The outputs of a panel, by which whoever allocates panels rounds up.
EXPORTED int64_t sagellm_panel() { return packed::PANEL; }

EXPORTED int32_t sagellm_pack(const Packing *job, int32_t threads) {
    if (job->rows <= 0) return DONE;
    switch (job->weight_type) {
        case FLOAT32: packed::pack<float>(*job, threads); return DONE;
        case BFLOAT16: packed::pack<BFloat16>(*job, threads); return DONE;
        case FLOAT16: packed::pack<Float16>(*job, threads); return DONE;
        default: return NO_KERNEL;
    }
}

EXPORTED int32_t sagellm_linear(const Linear *job, int32_t threads) {
    if (job->rows <= 0 || job->outputs <= 0) return DONE;
#if defined(__AVX512BF16__)
    if (job->x_type == BFLOAT16 && job->weight_type == BFLOAT16) switch (job->y_type) {
            case FLOAT32: return packed::run<packed::Pairs, float>(*job, threads) ? DONE : NO_MEMORY;
            case BFLOAT16: return packed::run<packed::Pairs, BFloat16>(*job, threads) ? DONE : NO_MEMORY;
            default: return NO_KERNEL;
        }
#endif
    if (job->x_type != FLOAT32 || job->y_type != FLOAT32) return NO_KERNEL;
    switch (job->weight_type) {
        case FLOAT32: return packed::run<packed::Floats<float>>(*job, threads) ? DONE : NO_MEMORY;
        case BFLOAT16: return packed::run<packed::Floats<BFloat16>>(*job, threads) ? DONE : NO_MEMORY;
        case FLOAT16: return packed::run<packed::Floats<Float16>>(*job, threads) ? DONE : NO_MEMORY;
        default: return NO_KERNEL;
    }
}

// Indices are checked before anything is written.
EXPORTED int32_t sagellm_gather(const Gather *job, int32_t threads) {
    for (int64_t row = 0; row < job->rows; row++)
        if (job->index[row] < 0 || job->index[row] >= job->outputs) return BAD_INDEX;
    if (job->y_type != job->type && job->y_type != FLOAT32) return NO_KERNEL;
    const bool is_same = job->type == job->y_type;
    switch (job->type) {
        case FLOAT32: packed::gather<float, float>(*job, threads); return DONE;
        case BFLOAT16:
            is_same ? packed::gather<BFloat16, BFloat16>(*job, threads) : packed::gather<BFloat16, float>(*job, threads);
            return DONE;
        case FLOAT16:
            is_same ? packed::gather<Float16, Float16>(*job, threads) : packed::gather<Float16, float>(*job, threads);
            return DONE;
        default: return NO_KERNEL;
    }
}

EXPORTED int32_t sagellm_replay(Replay *job, int32_t threads) { return replay(*job, threads); }

}  // extern "C"
