// The tasks of a grouped product: rows [starts[e], starts[e + 1]) meet the e-th of equal matrices, which lie one below
// another in panels. Where outputs are no multiple of a panel, two matrices share one, and both read it.

#pragma once
#include <algorithm>
#include <cstdint>

// Finds tasks by number; the numbers that a thread asks for must not decrease. A task is a panel, or a stripe of several,
// by at most `chunk` rows of one matrix.
class GroupedTasks {
  public:
    GroupedTasks(const int64_t *starts, int64_t matrices, int64_t outputs, int64_t panel, int64_t chunk)
        : starts_(starts), matrices_(matrices), outputs_(outputs), panel_(panel), chunk_(chunk) {}

    // False if there is no such task.
    bool move_to(int64_t task) {
        for (; matrix < matrices_; passed_ += tasks(), matrix++) {
            if (task >= passed_ + tasks()) continue;
            const int64_t local = task - passed_;
            first = starts_[matrix] + local / panels() * chunk_;
            rows = std::min(chunk_, starts_[matrix + 1] - first);
            panel = begin() / panel_ + local % panels();
            return true;
        }
        return false;
    }

    // The outputs of the matrix, [begin, end) of the stack.
    int64_t begin() const { return matrix * outputs_; }
    int64_t end() const { return begin() + outputs_; }

    int64_t matrix = 0, first = 0, rows = 0, panel = 0;

  private:
    int64_t panels() const { return (end() + panel_ - 1) / panel_ - begin() / panel_; }
    int64_t tasks() const {
        const int64_t count = starts_[matrix + 1] - starts_[matrix];
        return count ? (count + chunk_ - 1) / chunk_ * panels() : 0;
    }

    const int64_t *starts_;
    int64_t matrices_, outputs_, panel_, chunk_, passed_ = 0;
};

// Whether `starts` go from 0 to `rows` and never back.
inline bool are_starts(const int64_t *starts, int64_t matrices, int64_t rows) {
    return starts[0] == 0 && starts[matrices] == rows && std::is_sorted(starts, starts + matrices + 1);
}
