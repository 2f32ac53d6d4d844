// The C interface that each library of this folder has: how a call ends, and which threads help with it.
// No exception leaves the interface.

#pragma once
#include "threads.h"

// `_ERRORS` of calls.py has the text for each.
enum Outcome : int32_t {
    DONE = 0,
    NO_MEMORY = 1,
    NO_KERNEL = 2,
    BAD_SPAN = 3,
    BAD_BLOCK = 4,
    BAD_SLOT = 5,
    BAD_INDEX = 6
};

// All other symbols are hidden, so that libraries for two levels in one process share nothing.
#define EXPORTED __attribute__((visibility("default")))

// The function of this library that runs work on several threads.
extern "C" EXPORTED threads::Together sagellm_threads() { return threads::shared(); }

// Replaces that function by another library's, so that a process has one set of helper threads.
extern "C" EXPORTED void sagellm_share_threads(threads::Together together) { threads::shared() = together; }
