// Regions of work with helpers: every task is done once, whoever calls, and a child made by fork has its own.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "threads.h"

static void region(int32_t num_threads, int64_t num_tasks) {
    std::vector<int32_t> done(size_t(num_tasks), 0);
    std::atomic<int64_t> next{0};
    threads::together(num_threads, [&] {
        for (int64_t at; (at = next.fetch_add(1)) < num_tasks;) done[size_t(at)]++;
    });
    for (int32_t times : done)
        if (times != 1) {
            std::printf("a task was done %d times\n", times);
            std::_Exit(1);
        }
}

static void regions(int64_t count, unsigned seed) {
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        region(1 + int32_t(seed >> 8) % 5, int64_t(seed >> 16) % 40);
        if (seed % 997 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));  // helpers fall asleep
    }
}

// Whether so many threads are in one region at a time.
static bool all_come(int32_t num_threads) {
    std::atomic<int32_t> entered{0};
    const int64_t until = threads::now_ns() + 20'000'000'000;
    threads::together(num_threads, [&] {
        entered++;
        while (entered < num_threads && threads::now_ns() < until) std::this_thread::yield();
    });
    return entered == num_threads;
}

// Its parent's helpers stayed behind, and whoever was in a region.
static bool works_in_a_child() {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        region(4, 100);
        std::_Exit(all_come(4) ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    return status == 0;
}

static bool works_in_a_child_made_during_a_region() {
    std::atomic<bool> inside{false}, over{false};
    std::thread caller([&] {
        threads::together(2, [&] {
            inside = true;
            while (!over) std::this_thread::yield();
        });
    });
    while (!inside) std::this_thread::yield();
    const bool works = works_in_a_child();
    over = true;
    caller.join();
    return works;
}

int main() {
    std::vector<std::thread> callers;
    for (unsigned caller = 0; caller < 4; caller++) callers.emplace_back(regions, 10000, caller);
    for (std::thread &caller : callers) caller.join();
    if (!all_come(4)) return 1;
#if !defined(__SANITIZE_THREAD__)  // which does not follow threads that a child starts
    if (!works_in_a_child() || !works_in_a_child_made_during_a_region()) return 1;
#endif
    std::printf("40000 regions\n");
    return 0;
}
