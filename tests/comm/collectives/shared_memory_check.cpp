// Ranks as threads over one heap buffer of exact size, with small slots: run under sanitizers by test_kernel_check.py.
// A rank that reads a slot too late or writes one too early is a data race, which the thread sanitizer reports.

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "shared_memory.cpp"

namespace {

constexpr int64_t SLOT = 4096, OPERATIONS = 400;
int failures = 0;

void expect(bool right, const char *what) {
    if (!right) std::printf("wrong: %s\n", what), __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
}

// Calls until it no longer stalls, as Python does.
template <typename Call>
void finish(Call call) {
    int32_t outcome;
    while ((outcome = call()) == STALLED) {}
    expect(outcome == OK, "outcome");
}

void run(Group g) {
    std::mt19937 alike(7), own(g.rank);  // all ranks draw the same operations
    for (int64_t turn = 0; turn < OPERATIONS; turn++) {
        const int64_t operation = alike() % 7, count = alike() % (alike() % 4 ? 300 : 9000);
        const int32_t source = alike() % g.world;
        const int64_t world = g.world, me = g.rank;
        std::vector<int32_t> data(count * world), output(count * world);
        for (int64_t i = 0; i < count * world; i++) data[i] = int32_t(turn + i * (me + 1));
        const auto bytes = [](std::vector<int32_t> &v) { return reinterpret_cast<uint8_t *>(v.data()); };
        const auto sum = [&](int64_t i) { return int32_t(world * turn + i * world * (world + 1) / 2); };
        if (own() % 8 == 0) std::this_thread::yield();
        if (operation < 2) {
            finish([&] { return sagellm_all_reduce(&g, bytes(data), count, 5, 0, operation + 1); });
            for (int64_t i = 0; i < count; i++) expect(data[i] == sum(i), "all_reduce");
        } else if (operation == 2) {
            finish([&] { return sagellm_reduce_scatter(&g, bytes(output), bytes(data), count, 5, 0); });
            for (int64_t i = 0; i < count; i++) expect(output[i] == sum(me * count + i), "reduce_scatter");
        } else if (operation == 3) {
            finish([&] { return sagellm_all_gather(&g, bytes(output), bytes(data), 4 * count, 5); });
            for (int64_t i = 0; i < count * world; i++)
                expect(output[i] == int32_t(turn + i % count * (i / count + 1)), "all_gather");
        } else if (operation == 4) {
            finish([&] { return sagellm_broadcast(&g, bytes(data), 4 * count, 5, source); });
            for (int64_t i = 0; i < count; i++) expect(data[i] == int32_t(turn + i * (source + 1)), "broadcast");
        } else if (operation == 5) {
            const std::vector<int64_t> sizes(world, 4 * count);
            finish([&] { return sagellm_all_to_all(&g, bytes(output), bytes(data), sizes.data(), sizes.data(), 5); });
            for (int64_t i = 0; i < count * world; i++)
                expect(output[i] == int32_t(turn + (me * count + i % count) * (i / count + 1)), "all_to_all");
        } else {
            finish([&] { return sagellm_barrier(&g); });
        }
    }
}

}  // namespace

int main() {
    for (int32_t world = 1; world <= 4; world++) {
        const int64_t notes = world * 256, note = 64 + 16 * world, slots = notes + 2 * world * note;
        const int64_t aligned = (slots + 127) / 128 * 128, total = aligned + 2 * world * SLOT;
        auto *memory = static_cast<uint8_t *>(std::aligned_alloc(128, (total + 127) / 128 * 128));
        std::memset(memory, 0, total);
        std::vector<Group> groups;
        std::vector<std::thread> ranks;
        for (int32_t rank = 0; rank < world; rank++) {
            Group g{};
            g.memory = memory, g.flags_at = 0, g.notes_at = notes, g.note_bytes = note, g.slots_at = aligned;
            g.slot_bytes = SLOT, g.rank = rank, g.world = world, g.step = 0xfffffff0;  // it wraps around
            g.spins = 5, g.yield_ns = 20000, g.sleep_ns = 300000;
            flags(&g, rank).in.count = g.step, flags(&g, rank).out.count = g.step;
            groups.push_back(g);
        }
        for (const Group &g : groups) ranks.emplace_back(run, g);
        for (std::thread &rank : ranks) rank.join();
        std::free(memory);
    }
    std::printf("%lld operations compared\n", static_cast<long long>(4 * OPERATIONS));
    return failures != 0;
}
