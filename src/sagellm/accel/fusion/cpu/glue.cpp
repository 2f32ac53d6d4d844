// The operations between a decoder's matrices, for float32, bfloat16 or float16. Few rows are done by the calling
// thread: others would take longer to wake up than to help. No exception leaves the C interface.

#include <atomic>

#include "glue.h"
#include "threads.h"

enum Outcome : int32_t { DONE = 0, NO_KERNEL = 2, BAD_SLOT = 5 };

#define EXPORTED __attribute__((visibility("default")))

namespace {

constexpr int64_t TASK_ELEMENTS = 1 << 14;  // of a row or several; one thread takes some microseconds
constexpr int64_t GATED_COLUMNS = 1 << 12;  // whole vectors: how a row is cut does not show in its results

// Has `work(first, last)` done for all of `count` items; `item_elements` says how long one of them takes.
template <typename Work>
void in_tasks(int64_t count, int64_t item_elements, int32_t threads, const Work &work) {
    const int64_t step = item_elements < TASK_ELEMENTS ? TASK_ELEMENTS / (item_elements + 1) + 1 : 1;
    const int64_t tasks = (count + step - 1) / step;
    if (tasks < 3 || threads < 2) return work(0, count);
    std::atomic<int64_t> next{0};
    // Tasks are taken, not dealt: a thread that another process holds up takes fewer.
    threads::together(tasks < threads ? int32_t(tasks) : threads, [&] {
        for (int64_t first; (first = next.fetch_add(step)) < count;)
            work(first, count - first < step ? count : first + step);
    });
}

// Calls `call` with a number of the type.
template <typename Call>
int32_t by_type(int32_t type, const Call &call) {
    switch (type) {
        case FLOAT32: return call(float{});
        case BFLOAT16: return call(BFloat16{});
        case FLOAT16: return call(Float16{});
        default: return NO_KERNEL;
    }
}

}  // namespace

extern "C" {

// Helpers are those of another library from now on: there is one set of them in a process.
EXPORTED void sagellm_share_threads(threads::Together together) { threads::shared() = together; }

EXPORTED int32_t sagellm_add_norm(const AddNorm *job, int32_t threads) {
    return by_type(job->type, [&](auto number) {
        in_tasks(job->rows, job->columns, threads, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) add_norm<decltype(number)>(*job, row);
        });
        return DONE;
    });
}

// Slots are checked before anything is changed.
EXPORTED int32_t sagellm_rotate(const Rotate *job, int32_t threads) {
    for (int64_t row = 0; row < job->rows; row++)
        if (job->slots[row] < 0 || job->slots[row] / job->block_size >= job->num_blocks) return BAD_SLOT;
    const int64_t elements = (job->query_heads + 2 * job->kv_heads) * job->dim;
    return by_type(job->type, [&](auto number) {
        return by_type(job->pool_type, [&](auto held) {
            in_tasks(job->rows, elements, threads, [&](int64_t first, int64_t last) {
                for (int64_t row = first; row < last; row++) rotate<decltype(number), decltype(held)>(*job, row);
            });
            return DONE;
        });
    });
}

EXPORTED int32_t sagellm_gated(const Gated *job, int32_t threads) {
    const int64_t pieces = (job->columns + GATED_COLUMNS - 1) / GATED_COLUMNS;
    const int64_t elements = job->columns < GATED_COLUMNS ? job->columns : GATED_COLUMNS;
    return by_type(job->type, [&](auto number) {
        in_tasks(job->rows * pieces, elements, threads, [&](int64_t begin, int64_t end) {
            for (int64_t at = begin; at < end; at++) {
                const int64_t first = at % pieces * GATED_COLUMNS, last = first + GATED_COLUMNS;
                gated<decltype(number)>(*job, at / pieces, first, last < job->columns ? last : job->columns);
            }
        });
        return DONE;
    });
}

}  // extern "C"
