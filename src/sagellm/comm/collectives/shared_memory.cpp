// Collectives of ranks on one host, over memory that all of them have mapped.
//
// Each rank has two slots, used in turns: step s uses slot s % 2. A rank copies its part of a step into its slot,
// publishes `in`, waits for the `in` of the others, and reads their slots. It may write to a slot again two steps
// later: the `in` of the step between, which it waits for, says that the others have ended the step before.
//
// Every element is summed in order of rank, whatever the algorithm and the size, so all of them give equal bits.

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int32_t OK = 0, STALLED = 1, DISAGREE = 2;
constexpr int32_t MOST_RANKS = 64;
constexpr int32_t PATIENCE = 50;

// 128 bytes: x86 fetches lines in pairs.
struct alignas(128) Flag {
    std::atomic<uint32_t> count;  // steps that the rank has published; wraps around
    std::atomic<uint32_t> sleepers;
};

struct Flags {
    Flag in, out;
};

// What a rank submits, compared with what the others submit. Sizes follow: those sent to each rank, then those
// expected from each.
struct alignas(8) Note {
    int32_t operation, dtype, argument, unused;
    int64_t count;
};

}  // namespace

// The Python side has the same fields in the same order.
struct Group {
    uint8_t *memory;
    int64_t flags_at, notes_at, note_bytes, slots_at, slot_bytes;
    int32_t rank, world;
    uint32_t step;  // the first of the operation under way, or of the next
    int32_t spins;
    int64_t yield_ns, sleep_ns;
    int32_t waiting_for;  // after STALLED: the rank
    int32_t done, stage;  // stages of the operation that earlier calls have ended, and that this one has passed
    int64_t longest;      // of all_to_all: the largest size that a rank sends to another
};

namespace {

Flags &flags(const Group *g, int32_t rank) { return reinterpret_cast<Flags *>(g->memory + g->flags_at)[rank]; }

uint8_t *slot(const Group *g, int32_t rank, uint32_t step) {
    return g->memory + g->slots_at + (2 * rank + step % 2) * g->slot_bytes;
}

Note &note(const Group *g, int32_t rank, uint32_t step) {
    return *reinterpret_cast<Note *>(g->memory + g->notes_at + (2 * rank + step % 2) * g->note_bytes);
}

int64_t *sizes(Note &note) { return reinterpret_cast<int64_t *>(&note + 1); }

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

void futex(std::atomic<uint32_t> &word, int operation, uint32_t value, const timespec *timeout) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), operation, value, timeout, nullptr, 0);
}

void publish(Flag &flag, uint32_t count) {
    flag.count.store(count, std::memory_order_seq_cst);
    if (flag.sleepers.load(std::memory_order_seq_cst)) futex(flag.count, FUTEX_WAKE, INT_MAX, nullptr);
}

bool reached(const Flag &flag, uint32_t count) {
    return int32_t(flag.count.load(std::memory_order_acquire) - count) >= 0;
}

// Spins for a moment, yields the core for a while, then sleeps once: the other rank may need this core.
bool arrives(const Group *g, Flag &flag, uint32_t count, int32_t spins) {
    for (int32_t turn = 0; turn < spins; turn++) {
        if (reached(flag, count)) return true;
        relax();
    }
    for (const int64_t until = now_ns() + g->yield_ns; now_ns() < until; sched_yield())
        if (reached(flag, count)) return true;
    flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = flag.count.load(std::memory_order_seq_cst);
    const timespec timeout{g->sleep_ns / 1000000000, g->sleep_ns % 1000000000};
    if (int32_t(seen - count) < 0) futex(flag.count, FUTEX_WAIT, seen, &timeout);
    flag.sleepers.fetch_sub(1, std::memory_order_relaxed);
    return reached(flag, count);
}

// An operation is a sequence of stages. A call whose wait lasts long returns STALLED, so that Python can look after
// signals and dead ranks; it then calls again, and the stages that are done are passed over.
template <typename Action>
void once(Group *g, const Action &action) {
    if (g->stage++ < g->done) return;
    action();
    g->done = g->stage;
}

bool wait_for_all(Group *g, Flag Flags::*which, uint32_t step) {
    if (g->stage++ < g->done) return true;
    // In the middle of a large buffer the others are at work: a rank that yields may lose the core for milliseconds.
    const int32_t spins = step == g->step ? g->spins : PATIENCE * g->spins;
    for (int32_t rank = 0; rank < g->world; rank++)
        if (rank != g->rank && !arrives(g, flags(g, rank).*which, step + 1, spins)) return g->waiting_for = rank, false;
    g->done = g->stage;
    return true;
}

// `out` keeps up with the steps of operations that do not use it: after 2^31 of them an old count would look ahead.
int32_t ended(Group *g, uint32_t steps, int32_t outcome) {
    g->step += steps, g->done = 0;
    flags(g, g->rank).out.count.store(g->step, std::memory_order_release);
    return outcome;
}

void publish_in(const Group *g, uint32_t step) { publish(flags(g, g->rank).in, step + 1); }
void publish_out(const Group *g, uint32_t step) { publish(flags(g, g->rank).out, step + 1); }

// Before the first step. The others may read it once that is published.
void write_note(const Group *g, int32_t operation, int32_t dtype, int32_t argument, int64_t count) {
    if (!g->done) note(g, g->rank, g->step) = {operation, dtype, argument, 0, count};
}

// Empty tensors have no address.
void copy(uint8_t *to, const uint8_t *from, int64_t num_bytes) {
    if (num_bytes > 0 && to != from) std::memcpy(to, from, num_bytes);
}

// After the first step of an operation: whether all ranks submitted the same. All see the same notes.
bool agreed(const Group *g, uint32_t step) {
    for (int32_t rank = 0; rank < g->world; rank++)
        if (std::memcmp(&note(g, rank, step), &note(g, g->rank, step), sizeof(Note))) return false;
    return true;
}

// ---------------------------------------------------------------------------------------------- arithmetic

template <typename T>
struct Plain {
    using Stored = T;
    using Sum = T;
    static Sum load(T x) { return x; }
    static T store(Sum x) { return x; }
};

struct BFloat16 {
    using Stored = uint16_t;
    using Sum = float;
    static float load(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }
    static uint16_t store(float x) {
        const uint32_t bits = std::bit_cast<uint32_t>(x);
        const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
};

struct Float16 {
    using Stored = uint16_t;
    using Sum = float;
    static float load(uint16_t x) {
        const uint32_t magnitude = uint32_t(x & 0x7fff) << 13, sign = uint32_t(x & 0x8000) << 16;
        const uint32_t normal = magnitude + ((x & 0x7c00) == 0x7c00 ? 0x70000000 : 0x38000000);
        // Of a subnormal number: the bits behind those of 2^-14, which is then subtracted.
        const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude + 0x38800000) - 0x1p-14f);
        return std::bit_cast<float>(((x & 0x7c00) ? normal : small) | sign);
    }
    static uint16_t store(float x) {
        const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
        const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13;
        // The sum with 0.5 rounds to multiples of 2^-24, the smallest float16.
        const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
        uint32_t rounded = magnitude < 0x38800000 ? small : normal;
        rounded = magnitude >= 0x477ff000 ? 0x7c00 : rounded;
        rounded = magnitude > 0x7f800000 ? 0x7e00 : rounded;
        return uint16_t(rounded | (bits >> 16 & 0x8000));
    }
};

struct Add {
    template <typename T>
    static T apply(T a, T b) {
        if constexpr (std::is_integral_v<T>) {
            using U = std::make_unsigned_t<T>;
            return T(U(U(a) + U(b)));
        } else {
            return a + b;
        }
    }
};

// Not a number if either is.
struct Max {
    template <typename T>
    static T apply(T a, T b) { return (a > b) | (a != a) ? a : b; }
};

struct Min {
    template <typename T>
    static T apply(T a, T b) { return (a < b) | (a != a) ? a : b; }
};

// Reduces `count` elements of each of `world` sources into `target`, and into `copy` if there is one. Sources may be
// the targets themselves.
template <typename E, typename Op>
void reduce_as(uint8_t *target, uint8_t *copy, const uint8_t *const *sources, int32_t world, int64_t count) {
    using T = typename E::Stored;
    constexpr int64_t BLOCK = 4096 / sizeof(typename E::Sum);
    typename E::Sum sums[BLOCK];
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t size = std::min(BLOCK, count - start);
        const T *first = reinterpret_cast<const T *>(sources[0]) + start;
        const T *second = reinterpret_cast<const T *>(sources[world > 1]) + start;
        T *results = reinterpret_cast<T *>(target) + start;
        if (world == 2) {  // without sums in between, which take a pass of their own
#pragma GCC ivdep
            for (int64_t i = 0; i < size; i++)
                results[i] = E::store(Op::apply(E::load(first[i]), E::load(second[i])));
        } else if (world > 2) {
            for (int64_t i = 0; i < size; i++) sums[i] = Op::apply(E::load(first[i]), E::load(second[i]));
            for (int32_t rank = 2; rank < world; rank++) {
                const T *next = reinterpret_cast<const T *>(sources[rank]) + start;
                for (int64_t i = 0; i < size; i++) sums[i] = Op::apply(sums[i], E::load(next[i]));
            }
            for (int64_t i = 0; i < size; i++) results[i] = E::store(sums[i]);
        } else if (results != first) {
            std::memcpy(results, first, size * sizeof(T));
        }
        if (copy) std::memcpy(reinterpret_cast<T *>(copy) + start, results, size * sizeof(T));
    }
}

using Reduce = void (*)(uint8_t *, uint8_t *, const uint8_t *const *, int32_t, int64_t);

template <typename E>
Reduce with_op(int32_t op) {
    return op == 0 ? reduce_as<E, Add> : op == 1 ? reduce_as<E, Max> : reduce_as<E, Min>;
}

// The order of `REDUCIBLE` on the Python side.
Reduce reducer(int32_t dtype, int32_t op) {
    switch (dtype) {
        case 0: return with_op<Plain<double>>(op);
        case 1: return with_op<Plain<float>>(op);
        case 2: return with_op<Float16>(op);
        case 3: return with_op<BFloat16>(op);
        case 4: return with_op<Plain<int64_t>>(op);
        case 5: return with_op<Plain<int32_t>>(op);
        case 6: return with_op<Plain<int16_t>>(op);
        case 7: return with_op<Plain<int8_t>>(op);
        default: return with_op<Plain<uint8_t>>(op);
    }
}

int64_t size_of(int32_t dtype) {
    constexpr int64_t SIZES[] = {8, 4, 2, 2, 8, 4, 2, 1, 1};
    return SIZES[dtype];
}

// ---------------------------------------------------------------------------------------------- algorithms

// Where the pieces of a chunk of `count` elements begin: whole cache lines, but for the last.
struct Pieces {
    int64_t count, each;
    Pieces(int64_t count, int32_t world, int64_t element) : count(count) {
        const int64_t line = 64 / element;
        each = (count + world * line - 1) / (world * line) * line;
    }
    int64_t start(int32_t rank) const { return std::min(count, rank * each); }
    int64_t size(int32_t rank) const { return start(rank + 1) - start(rank); }
};

// One step of an operation: copies in, publishes, waits for the others, and copies out what they show. In the first
// step it sees whether all ranks submitted the same.
template <typename In, typename Out, typename Agreed>
int32_t exchange(Group *g, uint32_t step, const In &copy_in, const Out &copy_out, const Agreed &agreed) {
    once(g, [&] { copy_in(), publish_in(g, step); });
    if (!wait_for_all(g, &Flags::in, step)) return STALLED;
    bool same = true;
    once(g, [&] {
        same = step != g->step || agreed(g, step);
        if (same) copy_out();
    });
    return same ? OK : DISAGREE;
}

template <typename In, typename Out>
int32_t exchange(Group *g, uint32_t step, const In &copy_in, const Out &copy_out) {
    return exchange(g, step, copy_in, copy_out, agreed);
}

// `body(step, start, size)` for each part of `count` that has at most `most`; at least one, so that all ranks meet.
template <typename Body>
int32_t in_steps(Group *g, int64_t count, int64_t most, const Body &body) {
    g->stage = 0;
    uint32_t step = g->step;
    for (int64_t start = 0; start == 0 || start < count; start += most, step++)
        if (const int32_t outcome = body(step, start, std::min(most, count - start)))
            return outcome == STALLED ? STALLED : ended(g, 1, outcome);
    return ended(g, step - g->step, OK);
}

// Every rank reads all of every slot: one wait for a step.
int32_t one_shot(Group *g, uint8_t *data, int64_t count, int64_t element, Reduce reduce) {
    return in_steps(g, count, g->slot_bytes / element, [&](uint32_t step, int64_t start, int64_t size) {
        uint8_t *part = data + start * element;
        return exchange(
            g, step, [&] { copy(slot(g, g->rank, step), part, size * element); },
            [&] {
                const uint8_t *sources[MOST_RANKS];
                for (int32_t rank = 0; rank < g->world; rank++) sources[rank] = slot(g, rank, step);
                sources[g->rank] = part;
                reduce(part, nullptr, sources, g->world, size);
            });
    });
}

// Each rank reduces its piece of a chunk, then all gather the pieces: less traffic, two waits. A slot has an area for
// each rank's piece. The result is in the rank's own area, where no input is, until the others have copied it: so the
// areas are alike for all chunks. While others reduce chunk k, this rank copies chunk k + 1 in.
int32_t two_shot(Group *g, uint8_t *data, int64_t count, int64_t element, Reduce reduce) {
    const int64_t area = g->slot_bytes / g->world / 64 * 64, most = area / element * g->world;
    const int64_t chunks = std::max<int64_t>(1, (count + most - 1) / most);
    const uint32_t first = g->step;
    const int32_t me = g->rank;
    const auto pieces = [&](int64_t k) { return Pieces(std::min(most, count - k * most), g->world, element); };
    const auto copy_in = [&](int64_t k) {
        const Pieces p = pieces(k);
        for (int32_t rank = 0; rank < g->world; rank++)
            if (rank != me)
                copy(slot(g, me, first + k) + rank * area,
                            data + (k * most + p.start(rank)) * element, p.size(rank) * element);
        publish_in(g, first + k);
    };
    const auto reduce_piece = [&](int64_t k) {
        const Pieces p = pieces(k);
        const uint8_t *sources[MOST_RANKS];
        uint8_t *target = data + (k * most + p.start(me)) * element;
        for (int32_t rank = 0; rank < g->world; rank++)
            sources[rank] = slot(g, rank, first + k) + me * area;
        sources[me] = target;
        reduce(target, slot(g, me, first + k) + me * area, sources, g->world, p.size(me));
        publish_out(g, first + k);
    };
    const auto copy_out = [&](int64_t k) {
        const Pieces p = pieces(k);
        for (int32_t turn = 1; turn < g->world; turn++) {
            const int32_t rank = (me + turn) % g->world;
            copy(data + (k * most + p.start(rank)) * element,
                        slot(g, rank, first + k) + rank * area, p.size(rank) * element);
        }
    };
    g->stage = 0;
    once(g, [&] { copy_in(0); });
    for (int64_t k = 0; k <= chunks; k++) {
        if (k < chunks && !wait_for_all(g, &Flags::in, first + k)) return STALLED;
        bool same = true;
        if (k == 0) once(g, [&] { same = agreed(g, first); });
        if (!same) return ended(g, 1, DISAGREE);
        if (k > 0 && !wait_for_all(g, &Flags::out, first + k - 1)) return STALLED;
        once(g, [&] {
            if (k > 0) copy_out(k - 1);
            if (k + 1 < chunks) copy_in(k + 1);
            if (k < chunks) reduce_piece(k);
        });
    }
    return ended(g, chunks, OK);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

enum Operation : int32_t { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, BARRIER };

EXPORT int32_t sagellm_all_reduce(Group *g, uint8_t *data, int64_t count, int32_t dtype, int32_t op,
                                  int32_t num_shots) {
    write_note(g, ALL_REDUCE, dtype, op * 4 + num_shots, count);
    const auto algorithm = num_shots == 1 ? one_shot : two_shot;
    return algorithm(g, data, count, size_of(dtype), reducer(dtype, op));
}

// `count` elements for each rank.
EXPORT int32_t sagellm_reduce_scatter(Group *g, uint8_t *output, const uint8_t *data, int64_t count, int32_t dtype,
                                      int32_t op) {
    write_note(g, REDUCE_SCATTER, dtype, op, count);
    const int64_t element = size_of(dtype), most = g->slot_bytes / g->world / 64 * 64 / element;
    return in_steps(g, count, most, [&](uint32_t step, int64_t start, int64_t size) {
        const auto copy_in = [&] {
            for (int32_t rank = 0; rank < g->world; rank++)
                if (rank != g->rank)
                    copy(slot(g, g->rank, step) + rank * most * element,
                                data + (rank * count + start) * element, size * element);
        };
        return exchange(g, step, copy_in, [&] {
            const uint8_t *sources[MOST_RANKS];
            for (int32_t rank = 0; rank < g->world; rank++)
                sources[rank] = slot(g, rank, step) + g->rank * most * element;
            sources[g->rank] = data + (g->rank * count + start) * element;
            reducer(dtype, op)(output + start * element, nullptr, sources, g->world, size);
        });
    });
}

EXPORT int32_t sagellm_all_gather(Group *g, uint8_t *output, const uint8_t *part, int64_t num_bytes, int32_t dtype) {
    write_note(g, ALL_GATHER, dtype, 0, num_bytes);
    return in_steps(g, num_bytes, g->slot_bytes, [&](uint32_t step, int64_t start, int64_t size) {
        return exchange(
            g, step, [&] { copy(slot(g, g->rank, step), part + start, size); },
            [&] {
                copy(output + g->rank * num_bytes + start, part + start, size);
                for (int32_t turn = 1; turn < g->world; turn++) {
                    const int32_t rank = (g->rank + turn) % g->world;
                    copy(output + rank * num_bytes + start, slot(g, rank, step), size);
                }
            });
    });
}

EXPORT int32_t sagellm_broadcast(Group *g, uint8_t *data, int64_t num_bytes, int32_t dtype, int32_t source) {
    write_note(g, BROADCAST, dtype, source, num_bytes);
    return in_steps(g, num_bytes, g->slot_bytes, [&](uint32_t step, int64_t start, int64_t size) {
        const auto copy_in = [&] {
            if (g->rank == source) copy(slot(g, source, step), data + start, size);
        };
        return exchange(g, step, copy_in, [&] {
            if (g->rank != source) copy(data + start, slot(g, source, step), size);
        });
    });
}

// The largest size that a rank sends to another. Negative where a rank sends what the other does not expect.
static int64_t longest(const Group *g, uint32_t step) {
    int64_t most = 0;
    for (int32_t from = 0; from < g->world; from++)
        for (int32_t to = 0; to < g->world; to++) {
            const int64_t size = sizes(note(g, from, step))[to];
            if (size != sizes(note(g, to, step))[g->world + from]) return -1;
            if (from != to) most = std::max(most, size);
        }
    return most;
}

// Bytes to and from each rank.
EXPORT int32_t sagellm_all_to_all(Group *g, uint8_t *output, const uint8_t *data, const int64_t *expected,
                                  const int64_t *sent, int32_t dtype) {
    write_note(g, ALL_TO_ALL, dtype, 0, 0);
    int64_t *noted = sizes(note(g, g->rank, g->step));
    if (!g->done) std::copy(sent, sent + g->world, noted), std::copy(expected, expected + g->world, noted + g->world);
    const int64_t most = g->slot_bytes / g->world / 64 * 64;
    const auto fitting = [](Group *g, uint32_t step) {
        g->longest = longest(g, step);
        return agreed(g, step) && g->longest >= 0;
    };
    g->stage = 0;
    uint32_t step = g->step;
    for (int64_t start = 0; start == 0 || start < g->longest; start += most, step++) {
        const auto copy_in = [&] {
            for (int64_t rank = 0, begin = 0; rank < g->world; begin += sent[rank++])
                if (rank != g->rank && start < sent[rank])
                    copy(slot(g, g->rank, step) + rank * most, data + begin + start,
                                std::min(most, sent[rank] - start));
        };
        const auto copy_out = [&] {
            for (int64_t rank = 0, begin = 0; rank < g->world; begin += expected[rank++])
                if (rank != g->rank && start < expected[rank])
                    copy(output + begin + start, slot(g, rank, step) + g->rank * most,
                                std::min(most, expected[rank] - start));
                else if (rank == g->rank && start == 0)
                    copy(output + begin, data + std::accumulate(sent, sent + rank, int64_t(0)), sent[rank]);
        };
        if (const int32_t outcome = exchange(g, step, copy_in, copy_out, fitting))
            return outcome == STALLED ? STALLED : ended(g, 1, outcome);
    }
    return ended(g, step - g->step, OK);
}

EXPORT int32_t sagellm_barrier(Group *g) {
    write_note(g, BARRIER, 0, 0, 0);
    g->stage = 0;
    const auto nothing = [] {};
    const int32_t outcome = exchange(g, g->step, nothing, nothing);
    return outcome == STALLED ? STALLED : ended(g, 1, outcome);
}

EXPORT uint32_t sagellm_load(const std::atomic<uint32_t> *word) { return word->load(std::memory_order_acquire); }
EXPORT void sagellm_store(std::atomic<uint32_t> *word, uint32_t value) {
    word->store(value, std::memory_order_release);
}
