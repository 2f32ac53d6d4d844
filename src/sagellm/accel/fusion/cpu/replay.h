// Calls of this interface's functions that were made before, made again one after the other.

#pragma once
#include <cstdint>

struct Call {
    int32_t (*function)(const void *job, int32_t threads);
    const void *job;
};

// `failed` is where a replay ended that did not come to its end.
struct Replay {
    const Call *calls;
    int64_t count, failed;
};

inline int32_t replay(Replay &job, int32_t threads) {
    for (int64_t i = 0; i < job.count; i++)
        if (const int32_t outcome = job.calls[i].function(job.calls[i].job, threads)) {
            job.failed = i;
            return outcome;
        }
    return 0;
}
