// Regions of work with helpers: every task is done once, whoever calls, and after a fork too.

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

int main() {
    std::vector<std::thread> callers;
    for (unsigned caller = 0; caller < 4; caller++) callers.emplace_back(regions, 10000, caller);
    for (std::thread &caller : callers) caller.join();
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {  // its helpers stayed behind
        region(4, 100);
        std::_Exit(0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    if (status) return 1;
    std::printf("40000 regions\n");
    return 0;
}
