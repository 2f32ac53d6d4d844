// y = x W^T + bias for weights in 8 or 4 bits with scales in float16 or float32; x and y are float32, bfloat16 or
// float16. No exception leaves the C interface.

#include "quantized.h"

enum Outcome : int32_t { DONE = 0, NO_MEMORY = 1, NO_KERNEL = 2 };

// All else is hidden, so that libraries for two levels in one process share nothing.
#define EXPORTED __attribute__((visibility("default")))

namespace {

template <typename Form, typename Scale, int XBYTES>
int32_t by_x(const Quantized &job, int32_t threads) {
    if (job.y_type != job.x_type && job.y_type != FLOAT32) return NO_KERNEL;
    switch (job.x_type) {
        case FLOAT32: return quantized::run<Form, Scale, XBYTES, float>(job, threads) ? DONE : NO_MEMORY;
        case BFLOAT16: return quantized::run<Form, Scale, XBYTES, BFloat16>(job, threads) ? DONE : NO_MEMORY;
        case FLOAT16: return quantized::run<Form, Scale, XBYTES, Float16>(job, threads) ? DONE : NO_MEMORY;
        default: return NO_KERNEL;
    }
}

template <typename Form, int XBYTES>
int32_t by_scale(const Quantized &job, int32_t threads) {
    switch (job.scale_type) {
        case FLOAT32: return by_x<Form, float, XBYTES>(job, threads);
        case FLOAT16: return by_x<Form, Float16, XBYTES>(job, threads);
        default: return NO_KERNEL;
    }
}

}  // namespace

extern "C" {

// Regions of work are done by the threads of another library, `together` of its `sagellm_threads`.
EXPORTED void sagellm_share_threads(threads::Together together) { threads::shared() = together; }

// The matrix apart from the rest: it is the same in every call.
EXPORTED int32_t sagellm_linear_quantized(const Rows *rows, int32_t threads) {
    if (rows->rows <= 0 || rows->matrix->outputs <= 0) return DONE;
    const Quantized job = {*rows->matrix, *rows};
    switch (job.bits * 100 + job.activation_bits) {
        case 816: return by_scale<quantized::Eight, 2>(job, threads);
        case 808: return by_scale<quantized::Eight, 1>(job, threads);
        case 416: return by_scale<quantized::Four, 2>(job, threads);
        case 408: return by_scale<quantized::Four, 1>(job, threads);
        default: return NO_KERNEL;
    }
}

}  // extern "C"
