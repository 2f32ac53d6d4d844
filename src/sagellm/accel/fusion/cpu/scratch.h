// Memory that a thread keeps between calls.

#pragma once
#include <cstddef>
#include <cstdlib>

// A buffer of the calling thread. It grows and is kept, because the next call needs as much.
class Scratch {
  public:
    ~Scratch() { std::free(data_); }
    void *at_least(size_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = (bytes + 63) / 64 * 64;
            data_ = std::aligned_alloc(64, size_);
            if (!data_) size_ = 0;
        }
        return data_;
    }

  private:
    void *data_ = nullptr;
    size_t size_ = 0;
};
