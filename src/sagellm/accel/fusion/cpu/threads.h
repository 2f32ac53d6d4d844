// Helper threads that share a region of work. The caller works too and never waits for a helper that has not begun, so
// on a busy machine a region takes little longer than on one thread. An idle helper spins for the next region as long
// as the last one took, then it sleeps. A forked child has no helpers; its first region starts new ones.

#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace threads {

using Work = void (*)(const void *);
// Calls `work(context)` on the calling thread and on at most `threads` - 1 others. Returns when all have returned.
using Together = void (*)(Work work, const void *context, int32_t threads);

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

inline int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// One region at a time. `gate_` holds its number, whether it is closed, and how many helpers have entered. These change
// in one atomic word, so no helper enters a region that is over. Only a helper that has entered may read `work_` and
// `context_`.
class Helpers {
  public:
    void together(Work work, const void *context, int32_t threads) {
        bool is_free = false;
        if (threads < 2 || !busy_.compare_exchange_strong(is_free, true)) return work(context);  // another caller is in
        while (started_ < threads - 1 && started_ < MOST && start()) {}
        const int64_t began = now_ns();
        work_ = work, context_ = context, most_ = threads - 1;
        done_.store(0, std::memory_order_relaxed);
        const uint32_t region = (gate_.load(std::memory_order_relaxed) / NEXT + 1) * NEXT;
        gate_.store(region, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst)) gate_.notify_all();
        work(context);
        const uint32_t entered = gate_.fetch_or(CLOSED, std::memory_order_acq_rel) % CLOSED;
        for (int64_t turns = 0; done_.load(std::memory_order_acquire) < entered; turns++)
            turns < PATIENT_TURNS ? relax() : std::this_thread::yield();
        lasted_.store(now_ns() - began, std::memory_order_relaxed);
        busy_.store(false, std::memory_order_release);
    }

  private:
    static constexpr uint32_t CLOSED = 1 << 15, NEXT = 1 << 16;  // numbers wrap around, which is harmless
    static constexpr int32_t MOST = 1024;
    static constexpr int64_t PATIENT_TURNS = 1000, LONGEST_LOOK_NS = 2000000;

    bool start() {
        try {
            std::thread([this] { help(); }).detach();
        } catch (const std::system_error &) {
            return false;
        }
        started_++;
        return true;
    }

    void help() {
        for (uint32_t seen = 0;;) {
            seen = wait_for_other_than(seen);
            uint32_t gate = seen;
            while (gate / NEXT == seen / NEXT && !(gate & CLOSED)) {
                if (int32_t(gate % CLOSED) >= most_.load(std::memory_order_relaxed)) break;
                if (!gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) continue;
                work_(context_);
                done_.fetch_add(1, std::memory_order_release);
                break;
            }
        }
    }

    // Waits until another region than that of `seen` has begun, and returns the gate.
    uint32_t wait_for_other_than(uint32_t seen) {
        const int64_t until = now_ns() + std::min(lasted_.load(std::memory_order_relaxed), LONGEST_LOOK_NS);
        for (;;) {
            const uint32_t gate = gate_.load(std::memory_order_acquire);
            if (gate / NEXT != seen / NEXT) return gate;
            if (now_ns() < until) {
                relax();
                continue;
            }
            sleeping_.fetch_add(1, std::memory_order_seq_cst);
            gate_.wait(gate, std::memory_order_seq_cst);
            sleeping_.fetch_sub(1, std::memory_order_relaxed);
        }
    }

    std::atomic<uint32_t> gate_{0};
    std::atomic<uint32_t> done_{0};
    std::atomic<int32_t> most_{0}, sleeping_{0};
    std::atomic<int64_t> lasted_{0};
    std::atomic<bool> busy_{false};
    Work work_ = nullptr;
    const void *context_ = nullptr;
    int32_t started_ = 0;  // changed only by the holder of `busy_`
};

// Initialized before any code runs and never destroyed: helpers may read it while the process ends.
inline constinit Helpers own;

#if !defined(_WIN32)
// In a forked child the state is as before the first region, even if another thread was in one.
inline const int at_fork = pthread_atfork(nullptr, nullptr, [] { new (&own) Helpers; });
#endif

inline void own_helpers(Work work, const void *context, int32_t threads) {
    own.together(work, context, threads);
}

// This library's own function, until another library's replaces it.
inline std::atomic<Together> &shared() {
    static std::atomic<Together> together{own_helpers};
    return together;
}

// Calls `work()`, which takes tasks until none is left, on this thread and on others.
template <typename Callable>
void together(int32_t threads, const Callable &work) {
    if (threads < 2) return work();
    shared().load(std::memory_order_relaxed)(
        [](const void *context) { (*static_cast<const Callable *>(context))(); }, &work, threads);
}

}  // namespace threads
