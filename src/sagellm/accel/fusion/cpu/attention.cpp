// Causal attention over paged keys and values in float32, bfloat16 or float16, with online softmax. Sums are float32. A
// span of few tokens is split by keys, a longer one by tokens and kv heads. The split depends on the span alone, so its
// result depends neither on other spans nor on the number of threads.

#include <algorithm>
#include <atomic>

#include "few_tokens.h"
#include "interface.h"
#include "query_tiles.h"

namespace {

constexpr int64_t LEAST_WORK = 1 << 15;  // weights times dims; below, no helper threads are woken

int64_t first_key(const Attention &job, const Span &span) { return job.first_key(span.start); }

int64_t num_tasks(const Attention &job, const Span &span) {
    if (few_tokens::takes(job, span)) return few_tokens::splits(job, span);
    const int64_t tokens = query_tiles::share(job, span);
    return (span.tokens + tokens - 1) / tokens * job.kv_heads;
}

// Refuses a caller's mistakes before any memory is touched.
Outcome check(const Attention &job) {
    for (int64_t i = 0; i < job.num_spans; i++) {
        const Span &span = job.spans[i];
        if (span.tokens < 0 || span.first_row < 0 || span.first_row > job.num_rows - span.tokens) return BAD_SPAN;
        if (span.start < 0 || span.table < 0 || span.start > INT64_MAX / 2 - span.tokens) return BAD_SPAN;
        const int64_t blocks = (span.start + span.tokens + job.block_size - 1) / job.block_size;
        if (span.table > job.num_entries - blocks) return BAD_SPAN;
        for (int64_t b = first_key(job, span) / job.block_size; b < blocks; b++) {
            const int32_t block = job.tables[span.table + b];
            if (block < 0 || block >= job.num_blocks) return BAD_BLOCK;
        }
    }
    return DONE;
}

// Of a span of few tokens: where its parts begin, in bytes, and how many are left. The thread with the last part
// finishes the span.
struct Progress {
    size_t at;
    int64_t left;
};

// Lists the tasks of all spans: long spans first, and in these the last tokens, which see most keys, first.
void list_tasks(const Attention &job, Task *to, Progress *progress) {
    for (int64_t i = 0; i < job.num_spans; i++) {
        const Span &span = job.spans[i];
        if (few_tokens::takes(job, span)) continue;
        const int64_t step = query_tiles::share(job, span);
        for (int64_t first = (span.tokens - 1) / step * step; first >= 0; first -= step)
            for (int64_t head = 0; head < job.kv_heads; head++)
                *to++ = {i, head, first, span.tokens - first < step ? span.tokens : first + step};
    }
    size_t at = 0;
    for (int64_t i = 0; i < job.num_spans; i++) {
        const Span &span = job.spans[i];
        if (!few_tokens::takes(job, span)) continue;
        const int64_t end = span.start + span.tokens, step = few_tokens::split(job);
        progress[i] = {at, few_tokens::splits(job, span)};
        at += size_t(progress[i].left) * few_tokens::Sums::bytes(job, span);
        for (int64_t first = first_key(job, span); first < end; first += step)
            *to++ = {i, -1, first, end - first < step ? end : first + step};
    }
}

struct Totals {
    int64_t tasks = 0, tile_tasks = 0, work = 0;
    size_t part_bytes = 0, query_bytes = 0;  // of spans of few tokens: all their parts, the rows of the longest
};

Totals add_up(const Attention &job) {
    Totals sum;
    for (int64_t i = 0; i < job.num_spans; i++) {
        const Span &span = job.spans[i];
        const int64_t count = num_tasks(job, span);
        sum.tasks += count;
        if (few_tokens::takes(job, span)) {
            const int64_t rows = job.kv_heads * few_tokens::padded_rows(job, span);
            sum.part_bytes += size_t(count) * few_tokens::Sums::bytes(job, span);
            sum.query_bytes = std::max(sum.query_bytes, size_t(rows * job.padded_dim()) * sizeof(float));
        } else {
            sum.tile_tasks += count;
        }
        sum.work += span.tokens * (span.start + span.tokens) * job.heads * job.head_dim;
    }
    return sum;
}

template <typename Form>
bool run(const Attention &job, int32_t threads) {
    static thread_local Scratch task_memory, progress_memory, part_memory, thread_memory;
    const Totals sum = add_up(job);
    auto *tasks = static_cast<Task *>(task_memory.at_least(size_t(sum.tasks) * sizeof(Task)));
    auto *progress = static_cast<Progress *>(progress_memory.at_least(size_t(job.num_spans) * sizeof(Progress)));
    auto *parts = static_cast<char *>(part_memory.at_least(sum.part_bytes));
    if (!tasks || !progress || (sum.part_bytes && !parts)) return false;
    list_tasks(job, tasks, progress);
    const size_t tile_bytes = sum.tile_tasks ? query_tiles::Buffers<Form>::bytes(job) : 0;
    std::atomic<bool> failed{false};
    std::atomic<int64_t> next{0};
    const int32_t useful = sum.work < LEAST_WORK ? 1 : sum.tasks < threads ? int32_t(sum.tasks) : threads;
    threads::together(useful, [&] {
        void *memory = thread_memory.at_least(std::max(sum.query_bytes, tile_bytes));
        if (!memory) failed = true;
        // Threads take tasks one by one, so a thread that another process delays takes fewer.
        for (int64_t at; !failed && (at = next.fetch_add(1)) < sum.tasks;) {
            if (at < sum.tile_tasks) {
                query_tiles::run<Form>(job, tasks[at], memory);
                continue;
            }
            const Task &task = tasks[at];
            const Span &span = job.spans[task.span];
            char *own = parts + progress[task.span].at;
            const int64_t part = (task.first - first_key(job, span)) / few_tokens::split(job);
            few_tokens::run<Form>(job, task, static_cast<float *>(memory),
                                  few_tokens::Sums(job, span, own + size_t(part) * few_tokens::Sums::bytes(job, span)));
            if (__atomic_sub_fetch(&progress[task.span].left, 1, __ATOMIC_ACQ_REL) == 0)
                few_tokens::finish(job, span, own);
        }
    });
    return !failed;
}

}  // namespace

extern "C" EXPORTED int32_t sagellm_paged_attention(const Attention *job, int32_t threads) {
    const Outcome outcome = check(*job);
    if (outcome != DONE || job->num_spans == 0) return outcome;
#if defined(__AMX_BF16__) && defined(__linux__)
    if (job->query_type == BFLOAT16 && job->pool_type == BFLOAT16 && tiles::are_granted())
        return run<TiledPairs>(*job, threads) ? DONE : NO_MEMORY;
#endif
#if defined(__AVX512BF16__)
    if (job->query_type == BFLOAT16 && job->pool_type == BFLOAT16) return run<Pairs>(*job, threads) ? DONE : NO_MEMORY;
#endif
    switch (job->pool_type) {
        case FLOAT32: return run<Floats<float>>(*job, threads) ? DONE : NO_MEMORY;
        case BFLOAT16: return run<Floats<BFloat16>>(*job, threads) ? DONE : NO_MEMORY;
        case FLOAT16: return run<Floats<Float16>>(*job, threads) ? DONE : NO_MEMORY;
        default: return NO_KERNEL;
    }
}
