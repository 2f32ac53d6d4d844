// A suffix tree of bounded depth with counts, and what it expects to follow a text.
//
// It holds every substring of up to `depth` tokens of its sequences. A node is entered by an edge of one or
// more tokens, which lie in the text at `start`; its `count` says how often the path up to the edge's first
// token occurs. Tokens are appended one at a time. All suffixes that have occurred before ("active") are
// moved along their edges, longest first; one that no edge continues becomes a leaf, whose edge grows with
// the text by itself. Each suffix becomes a leaf once, so a token costs O(depth) at most, and as much as the
// longest active suffix usually.
//
// Growing leaves and the one moving place of Ukkonen (1995) are taken from there; counts need all places.
// suffix_tree.py is the slow twin, and says what a proposal is. Text positions wrap around at 2^32, soon
// after the first, so that tests see it.

#include <algorithm>
#include <cstdint>
#include <deque>
#include <new>
#include <vector>

namespace {

using Id = uint32_t;
using Position = uint32_t;

constexpr Id ROOT = 0, NONE = 0;  // the root is no child
constexpr Id STALE = ~0u;
constexpr Position FIRST = -64;
constexpr uint32_t MAX_DEPTH = 256;
constexpr size_t SMALL = 4096;  // nodes that are never worth a rebuild
constexpr uint32_t MOST_CONTINUED = 256;  // continuations of a node, of which more than the best are looked at

struct Rules {
  uint32_t depth, min_match;
  double alpha, min_probability, doubt;
};

// `continued` sums the counts of the children. `best`: the child with the highest count; of several, the one
// that was entered last.
struct Node {
  Position start;
  uint32_t length, count, continued;
  Id best;
};

struct Links {
  Id first, next, previous;
};

// A place in the tree: behind `matched` tokens of the edge into `node`.
struct Place {
  Id node, parent;
  uint32_t matched;
};

struct Draft {
  double score = 0.0;
  uint32_t count = 0;
  int32_t tokens[MAX_DEPTH];
  double chances[MAX_DEPTH];
};

// A proposed tree: tokens, the parent of each, and the chance of each behind its parent.
struct Branching {
  uint32_t count = 0;
  int32_t tokens[MAX_DEPTH];
  int32_t parents[MAX_DEPTH];
  double chances[MAX_DEPTH];
};

// Child by node and first token: a table with linear probing. The hash is secret, so no text can make its
// probes long.
class Children {
 public:
  explicit Children(const uint64_t* secret) : secret_{secret[0], secret[1] | 1}, slots_(16) {}

  Id find(Id parent, int32_t token) const { return slots_[at(parent, token)].child; }

  void set(Id parent, int32_t token, Id child) {
    size_t slot = at(parent, token);
    if (slots_[slot].child == NONE) {
      if (3 * (size_ + 1) > 2 * slots_.size()) {
        grow();
        slot = at(parent, token);
      }
      ++size_;
    }
    slots_[slot] = {parent, token, child};
  }

  void erase(Id parent, int32_t token) {
    const size_t mask = slots_.size() - 1;
    size_t hole = at(parent, token);
    for (size_t next = (hole + 1) & mask; slots_[next].child != NONE; next = (next + 1) & mask) {
      const size_t home = hash(slots_[next].parent, slots_[next].token);
      if (((next - home) & mask) >= ((next - hole) & mask)) {
        slots_[hole] = slots_[next];
        hole = next;
      }
    }
    slots_[hole].child = NONE;
    --size_;
  }

  size_t size() const { return size_; }
  size_t bytes() const { return slots_.size() * sizeof(Slot); }

  template <typename F>
  void each(F visit) const {
    for (const Slot& slot : slots_)
      if (slot.child != NONE) visit(slot.parent, slot.token, slot.child);
  }

 private:
  struct Slot {
    Id parent;
    int32_t token;
    Id child;
  };

  size_t hash(Id parent, int32_t token) const {
    const uint64_t key = static_cast<uint64_t>(parent) << 32 | static_cast<uint32_t>(token);
    const auto product = static_cast<unsigned __int128>(key ^ secret_[0]) * secret_[1];
    return (static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64)) & (slots_.size() - 1);
  }

  size_t at(Id parent, int32_t token) const {
    size_t slot = hash(parent, token);
    while (slots_[slot].child != NONE && (slots_[slot].parent != parent || slots_[slot].token != token))
      slot = (slot + 1) & (slots_.size() - 1);
    return slot;
  }

  void grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.child != NONE) slots_[at(slot.parent, slot.token)] = slot;
  }

  uint64_t secret_[2];
  std::vector<Slot> slots_;
  size_t size_ = 0;
};

// One for all trees: callers hold Python's lock.
uint64_t versions = 0;
Draft drafts[2];
int best;  // the better one
Branching branching;

class Tree {
 public:
  Tree(const Rules& rules, bool removes, bool branches, const uint64_t* secret)
      : rules_(rules), removes_(removes), linked_(removes || branches), secret_{secret[0], secret[1]}, text_(16), children_(secret) {
    uint32_t ring = 1;
    while (ring < rules.depth) ring *= 2;
    places_.resize(ring);
    if (removes) leaves_.resize(ring);
    new_node({0, 0, 0, 0, NONE});
  }

  void append(int32_t token) {
    if (end_ - begin_ == text_.size()) grow_text();
    const Position at = end_++;
    text_[at & (text_.size() - 1)] = token;
    place_of(at) = {ROOT, ROOT, 0};
    for (Position start = active_; start != end_; ++start)
      if (!advance(start, token, at)) active_ = start + 1;
    if (active_ != end_ && end_ - active_ == rules_.depth) ++active_;
  }

  // Afterwards every suffix ends at a node, so a count holds for all tokens of its edge.
  void end_sequence() {
    const Position active = active_;
    for (Position start = active; start != end_; ++start)
      if (place_of(start).matched < nodes_[place_of(start).node].length) split(start, end_);
    const Position began = sequences_.empty() ? begin_ : sequences_.back();
    Position start = end_ - std::min(end_ - began, rules_.depth - 1);
    for (; start != active; ++start) {  // leaves that would still grow
      Node& leaf = nodes_[leaves_[start & (leaves_.size() - 1)]];
      leaf.length = end_ - leaf.start;
    }
    sequences_.push_back(end_);
    active_ = end_;
    version_ = ++versions;
  }

  int64_t remove_sequence() {
    if (sequences_.empty()) return 0;
    const Position end = sequences_.front();
    const int64_t removed = end - begin_;
    for (Position start = begin_; start != end; ++start)
      remove_suffix(start, start + std::min(rules_.depth, end - start));
    begin_ = end;
    sequences_.pop_front();
    if (nodes_.size() > SMALL && (nodes_.size() - free_.size()) * 4 < nodes_.size()) rebuild();
    return removed;
  }

  const Draft& propose(Tree* shared, uint32_t num_new, uint32_t most) {
    best = 0;
    drafts[best].score = 0.0;
    drafts[best].count = 0;
    for (Position start = active_; start != end_; ++start) {
      const uint32_t match = end_ - start, limit = limit_of(match, most);
      if (match < rules_.min_match || drafts[best].score >= highest(match, limit)) break;
      follow(place_of(start), match, limit, drafts[1 - best]);
      keep_better();
    }
    propose_shared(shared, num_new, most);
    return drafts[best];
  }

  // The likeliest tokens after all, as a tree. Of each tree the longest match counts, and those of half its
  // length, a quarter and so on: shorter ones have seen more.
  const Branching& propose_tree(Tree* shared, uint32_t num_new, uint32_t most, uint32_t branches) {
    matches_.assign(1, {});
    std::vector<Match>& all = matches_[0];
    for (uint32_t match = end_ - active_; match >= rules_.min_match; match /= 2)
      all.push_back({this, match, place_of(end_ - match)});
    Place place;
    for (uint32_t match = longest_shared(shared, num_new, place); match >= rules_.min_match; match /= 2)
      if (shared->locate(*this, end_ - match, place)) all.push_back({shared, match, place});
    branching.count = 0;
    coming_.clear();
    num_came_ = 0;
    expand(-1, 0, 1.0, branches);
    while (!coming_.empty() && branching.count < most) {
      std::pop_heap(coming_.begin(), coming_.end());
      const Coming next = coming_.back();
      coming_.pop_back();
      const uint32_t node = branching.count++;
      branching.tokens[node] = next.token;
      branching.parents[node] = next.parent;
      branching.chances[node] = next.chance;
      matches_.emplace_back();
      for (Match match : matches_[next.parent + 1])
        if (match.tree->step(match.place, next.token, next.parent)) matches_.back().push_back(match);
      expand(node, next.depth + 1, next.product, branches);
    }
    return branching;
  }

  const char* check();

  int64_t num_tokens() const { return end_ - begin_; }
  int64_t num_nodes() const { return nodes_.size() - free_.size(); }
  int64_t bytes() const {
    return nodes_.capacity() * sizeof(Node) + links_.capacity() * sizeof(Links) + children_.bytes() +
           (text_.capacity() + free_.capacity() + leaves_.capacity()) * 4 +
           places_.capacity() * sizeof(Place) + sequences_.size() * sizeof(Position) + sizeof *this;
  }

 private:
  struct Match {
    Tree* tree;
    uint32_t length;
    Place place;
  };
  struct Share {
    int32_t token;
    double share;
  };
  // A token that may come into the branching: the likeliest path first, of equal ones the first that came.
  struct Coming {
    double product, chance;
    uint32_t number;
    int32_t parent, token;
    uint32_t depth;
    bool operator<(const Coming& other) const {
      return product != other.product ? product < other.product : number > other.number;
    }
  };
  // Of one for all trees, too.
  static inline std::vector<std::vector<Match>> matches_;  // of the text and of each node of the branching
  static inline std::vector<Coming> coming_;
  static inline std::vector<Share> expected_, continuations_;
  static inline std::vector<Id> siblings_;
  static inline uint32_t num_came_;

  int32_t token_at(Position at) const { return text_[at & (text_.size() - 1)]; }
  Place& place_of(Position start) { return places_[start & (places_.size() - 1)]; }
  uint32_t limit_of(uint32_t match, uint32_t most) const {
    const double limit = rules_.alpha * match;
    return limit < most ? static_cast<uint32_t>(limit) : most;
  }
  double trust(uint32_t num_matched) const { return num_matched / (num_matched + rules_.doubt); }

  // No score of a match of this length is higher, nor of a shorter one.
  double highest(uint32_t match, uint32_t limit) const {
    double product = 1.0, score = 0.0;
    for (uint32_t num_matched = match; num_matched < match + limit; ++num_matched) {
      product *= trust(num_matched);
      score += product;
    }
    return score;
  }

  void grow_text() {
    std::vector<int32_t> larger(text_.size() * 2);
    for (Position at = begin_; at != end_; ++at) larger[at & (larger.size() - 1)] = token_at(at);
    text_.swap(larger);
  }

  Id new_node(const Node& node) {
    if (free_.empty()) {
      nodes_.push_back(node);
      if (linked_) links_.push_back({});
      return nodes_.size() - 1;
    }
    const Id id = free_.back();
    free_.pop_back();
    nodes_[id] = node;
    links_[id] = {};
    return id;
  }

  // Moves a suffix by the token `at`. False where no edge continues it: it is a leaf now.
  bool advance(Position start, int32_t token, Position at) {
    Place& place = place_of(start);
    if (place.matched < nodes_[place.node].length) {
      if (token_at(nodes_[place.node].start + place.matched) != token) {
        split(start, at);
        add_leaf(start, token, at);
        return false;
      }
      ++place.matched;
    } else {
      const Id child = children_.find(place.node, token);
      if (child == NONE) {
        add_leaf(start, token, at);
        return false;
      }
      Node& parent = nodes_[place.node];
      ++parent.continued;
      ++nodes_[child].count;
      if (parent.best != STALE && nodes_[parent.best].count <= nodes_[child].count) parent.best = child;
      place = {child, place.node, 1};
    }
    Node& node = nodes_[place.node];
    if (place.matched == node.length) node.start = at + 1 - node.length;  // its latest place
    return true;
  }

  void add_leaf(Position start, int32_t token, Position at) {
    const Id parent = place_of(start).node;
    const Id leaf = new_node({at, rules_.depth - (at - start), 1, 0, NONE});
    children_.set(parent, token, leaf);
    Node& above = nodes_[parent];
    ++above.continued;
    if (above.best != STALE && (above.best == NONE || nodes_[above.best].count <= 1)) above.best = leaf;
    if (removes_) leaves_[start & (leaves_.size() - 1)] = leaf;
    if (!linked_) return;
    const Id next = links_[parent].first;
    links_[leaf].next = next;
    if (next != NONE) links_[next].previous = leaf;
    links_[parent].first = leaf;
  }

  // Cuts the edge on which a suffix stands, at its place. `at`: the position behind the suffix's tokens.
  // Suffixes that stand on the edge, here or further up, have not come to its lower part.
  void split(Position start, Position at) {
    const Place place = place_of(start);
    const Id lower = place.node;
    const Id upper = new_node({at - place.matched, place.matched, 0, 0, lower});
    uint32_t staying = 0;
    for (Position other = start; other != end_; ++other)
      if (place_of(other).node == lower) {
        place_of(other).node = upper;
        ++staying;
      }
    Node &above = nodes_[upper], &below = nodes_[lower];
    above.count = below.count;
    below.count -= staying;
    above.continued = below.count;
    below.start += place.matched;
    below.length -= place.matched;
    if (nodes_[place.parent].best == lower) nodes_[place.parent].best = upper;
    children_.set(place.parent, token_at(above.start), upper);
    children_.set(upper, token_at(below.start), lower);
    if (!linked_) return;
    put_in_place_of(place.parent, lower, upper);
    links_[upper].first = lower;
  }

  // `fresh` takes the place of `old` among its siblings; `old` has none afterwards.
  void put_in_place_of(Id parent, Id old, Id fresh) {
    const Id next = links_[old].next, previous = links_[old].previous;
    links_[fresh].next = next;
    links_[fresh].previous = previous;
    if (next != NONE) links_[next].previous = fresh;
    (previous != NONE ? links_[previous].next : links_[parent].first) = fresh;
    links_[old].next = links_[old].previous = NONE;
  }

  // The labels of nodes that stay lie in later sequences: sequences leave in order, and a label moves on
  // with each pass.
  void remove_suffix(Position at, Position end) {
    path_.assign(1, ROOT);
    while (at != end) {
      const Id child = children_.find(path_.back(), token_at(at));
      --nodes_[path_.back()].continued;
      --nodes_[child].count;
      at += nodes_[child].length;
      path_.push_back(child);
    }
    for (size_t last = path_.size() - 1; last; --last) {
      const Id id = path_[last], parent = path_[last - 1];
      const Node& node = nodes_[id];
      Node& above = nodes_[parent];
      if (above.best == id && above.continued != node.count) above.best = STALE;
      if (!node.count) {
        if (!above.continued) above.best = NONE;
        remove_leaf(parent, id);
      } else if (node.continued == node.count && links_[links_[id].first].next == NONE) {
        join(parent, id);
      }
    }
  }

  void remove_leaf(Id parent, Id leaf) {
    const Links& links = links_[leaf];
    children_.erase(parent, token_at(nodes_[leaf].start));
    if (links.next != NONE) links_[links.next].previous = links.previous;
    (links.previous != NONE ? links_[links.previous].next : links_[parent].first) = links.next;
    free_.push_back(leaf);
  }

  // Makes one edge of those into a node and into its only child.
  void join(Id parent, Id id) {
    const Id child = links_[id].first;
    children_.set(parent, token_at(nodes_[id].start), child);
    children_.erase(id, token_at(nodes_[child].start));
    nodes_[child].start -= nodes_[id].length;
    nodes_[child].length += nodes_[id].length;
    if (nodes_[parent].best == id) nodes_[parent].best = child;
    put_in_place_of(parent, id, child);
    free_.push_back(id);
  }

  // Gives memory back that fewer tokens do not need.
  void rebuild() {
    Tree fresh(rules_, removes_, linked_, secret_);
    Position at = begin_;
    for (const Position end : sequences_) {
      for (; at != end; ++at) fresh.append(token_at(at));
      fresh.end_sequence();
    }
    std::swap(*this, fresh);
  }

  Id best_of(Id id) {
    if (nodes_[id].best != STALE) return nodes_[id].best;
    Id best = links_[id].first;
    for (Id child = links_[best].next; child != NONE; child = links_[child].next) {
      const Node &node = nodes_[child], &other = nodes_[best];
      const bool later = node.start - begin_ > other.start - begin_;
      if (node.count > other.count || (node.count == other.count && later)) best = child;
    }
    return nodes_[id].best = best;
  }

  void follow(Place place, uint32_t match, uint32_t limit, Draft& draft) {
    double product = 1.0;
    draft.score = 0.0;
    draft.count = 0;
    while (draft.count < limit) {
      double chance = trust(match + draft.count);
      if (place.matched == nodes_[place.node].length) {
        const Id child = best_of(place.node);
        if (child == NONE) break;
        chance *= static_cast<double>(nodes_[child].count) / nodes_[place.node].continued;
        place = {child, place.node, 0};
      }
      const Position at = nodes_[place.node].start + place.matched;
      const auto behind = static_cast<int32_t>(at - end_);  // a leaf that grows: a repetition goes on
      const int32_t token = behind < 0 ? token_at(at) : draft.tokens[behind];
      product *= chance;
      if (product < rules_.min_probability) break;
      draft.tokens[draft.count] = token;
      draft.chances[draft.count++] = chance;
      draft.score += product;
      ++place.matched;
    }
  }

  void keep_better() {
    if (drafts[1 - best].score > drafts[best].score) best = 1 - best;
  }

  // The longest match in the shared tree that is long enough, and its place; else 0.
  uint32_t longest_shared(Tree* shared, uint32_t num_new, Place& place) {
    if (shared == nullptr) {
      shared_version_ = 0;
      return 0;
    }
    uint32_t match = most_shared(*shared, num_new);
    while (match >= rules_.min_match && !shared->locate(*this, end_ - match, place)) --match;
    longest_shared_ = match;
    return match;
  }

  // Puts what may follow `node` of the branching into the heap. The highest chance that a match gives counts.
  void expand(int32_t node, uint32_t depth, double product, uint32_t branches) {
    expected_.clear();
    for (const Match& match : matches_[node + 1]) {
      const double trusted = trust(match.length + depth);
      match.tree->continuations(match.place, node, branches);
      for (const auto& [token, share] : continuations_) {
        const auto known = std::find_if(
            expected_.begin(), expected_.end(), [token = token](const Share& one) { return one.token == token; });
        if (known == expected_.end())
          expected_.push_back({token, trusted * share});
        else
          known->share = std::max(known->share, trusted * share);
      }
    }
    for (const auto& [token, chance] : expected_) {
      if (product * chance < rules_.min_probability) continue;
      coming_.push_back({product * chance, chance, num_came_++, node, token, depth});
      std::push_heap(coming_.begin(), coming_.end());
    }
  }

  // The token within an edge. A leaf that grows repeats what was proposed, up to `node` of the branching.
  int32_t within(const Place& place, int32_t node) const {
    const Position at = nodes_[place.node].start + place.matched;
    const auto behind = static_cast<int32_t>(at - end_);
    if (behind < 0) return token_at(at);
    int32_t depth = 0;
    for (int32_t up = node; up >= 0; up = branching.parents[up]) ++depth;
    for (; depth > behind + 1; --depth) node = branching.parents[node];
    return branching.tokens[node];
  }

  // What has followed a place, with its share: at most `branches` tokens, the most frequent first, of equal ones
  // that with the later label.
  void continuations(const Place& place, int32_t node, uint32_t branches) {
    continuations_.clear();
    const Node& above = nodes_[place.node];
    if (place.matched < above.length) {
      continuations_.push_back({within(place, node), 1.0});
      return;
    }
    const Id best = best_of(place.node);
    if (best == NONE) return;
    siblings_.assign(1, best);
    if (above.continued <= MOST_CONTINUED && branches > 1)
      for (Id child = links_[place.node].first; child != NONE; child = links_[child].next)
        if (child != best) siblings_.push_back(child);
    std::sort(siblings_.begin(), siblings_.end(), [this](Id a, Id b) {
      const Node &one = nodes_[a], &other = nodes_[b];
      if (one.count != other.count) return one.count > other.count;
      return one.start - begin_ > other.start - begin_;
    });
    for (size_t i = 0; i < siblings_.size() && i < branches; ++i) {
      const Node& child = nodes_[siblings_[i]];
      continuations_.push_back({token_at(child.start), static_cast<double>(child.count) / above.continued});
    }
  }

  // Moves a place by a token that follows `node` of the branching. False where nothing follows so.
  bool step(Place& place, int32_t token, int32_t node) const {
    if (place.matched < nodes_[place.node].length) {
      if (within(place, node) != token) return false;
      ++place.matched;
      return true;
    }
    const Id child = children_.find(place.node, token);
    if (child == NONE) return false;
    place = {child, place.node, 1};
    return true;
  }

  uint32_t most_shared(const Tree& shared, uint32_t num_new) {
    uint32_t longest = std::min(rules_.depth - 1, end_ - begin_);
    if (shared_version_ == shared.version_) longest = std::min(longest, longest_shared_ + num_new);
    shared_version_ = shared.version_;
    return longest_shared_ = longest;
  }

  // The longest match is at most as much longer than the one before as there are new tokens, unless a
  // sequence has come to the shared tree.
  void propose_shared(Tree* shared, uint32_t num_new, uint32_t most) {
    if (shared == nullptr) {
      shared_version_ = 0;
      return;
    }
    const uint32_t longest = most_shared(*shared, num_new);
    bool found = false;
    for (uint32_t match = longest; match >= rules_.min_match; --match) {
      const uint32_t limit = limit_of(match, most);
      if (drafts[best].score >= highest(match, limit)) break;
      Place place;
      if (!shared->locate(*this, end_ - match, place)) {
        if (!found) longest_shared_ = match - 1;
        continue;
      }
      found = true;
      shared->follow(place, match, limit, drafts[1 - best]);
      keep_better();
    }
  }

  bool locate(const Tree& other, Position at, Place& place) const {
    place = {ROOT, ROOT, 0};
    for (; at != other.end_; ++at) {
      const int32_t token = other.token_at(at);
      if (place.matched < nodes_[place.node].length) {
        if (token_at(nodes_[place.node].start + place.matched) != token) return false;
        ++place.matched;
      } else {
        const Id child = children_.find(place.node, token);
        if (child == NONE) return false;
        place = {child, place.node, 1};
      }
    }
    return true;
  }

  Rules rules_;
  bool removes_, linked_;
  uint64_t secret_[2];
  Position begin_ = FIRST, end_ = FIRST, active_ = FIRST;  // suffixes from `active_` on have occurred before
  std::vector<int32_t> text_;
  std::vector<Node> nodes_;
  std::vector<Links> links_;
  std::vector<Id> free_, leaves_, path_;
  std::vector<Place> places_;
  std::deque<Position> sequences_;  // their ends
  Children children_;
  uint64_t version_ = 0, shared_version_ = 0;
  uint32_t longest_shared_ = 0;
};

// What is wrong with the tree, or null.
const char* Tree::check() {
  std::vector<uint64_t> sums(nodes_.size()), counts(nodes_.size()), most(nodes_.size());
  const char* wrong = nullptr;
  children_.each([&](Id parent, int32_t token, Id child) {
    const Node& node = nodes_[child];
    ++counts[parent];
    sums[parent] += node.count;
    most[parent] = std::max<uint64_t>(most[parent], node.count);
    if (!node.count || !node.length) wrong = "a node that nothing passes, or with an empty edge";
    if (node.start - begin_ >= end_ - begin_) wrong = "a label that lies outside the text";
    if (token_at(node.start) != token) wrong = "a child under another token than its first";
  });
  if (children_.size() + 1 + free_.size() != nodes_.size()) wrong = "nodes that are no child, or leak";
  std::vector<char> is_free(nodes_.size());
  for (const Id id : free_) is_free[id] = 1;
  for (Id id = 0; id < nodes_.size(); ++id) {
    const Node& node = nodes_[id];
    if (is_free[id]) continue;
    if (sums[id] != node.continued) wrong = "a sum that is not that of the children's counts";
    if (id != ROOT && node.continued > node.count) wrong = "a node with more continuations than passes";
    if (node.best != STALE && (counts[id] ? nodes_[node.best].count != most[id] : node.best != NONE))
      wrong = "a best child that has not the highest count";
    if (!linked_) continue;
    uint64_t linked = 0;
    Id before = NONE;
    for (Id child = links_[id].first; child != NONE; before = child, child = links_[child].next) {
      ++linked;
      if (links_[child].previous != before) wrong = "siblings that disagree";
      if (children_.find(id, token_at(nodes_[child].start)) != child) wrong = "a sibling of other parents";
    }
    if (linked != counts[id]) wrong = "children that are not linked";
    if (!removes_) continue;
    if (active_ == end_ && id != ROOT && linked == 1 && node.continued == node.count)
      wrong = "two edges that are one";
    if (active_ == end_ && end_ - node.start < node.length) wrong = "a label that ends outside the text";
  }
  if (end_ - active_ >= rules_.depth) wrong = "a suffix that is too long to be active";
  return wrong;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void* sagellm_suffix_tree_new(
    uint32_t depth, uint32_t min_match, double alpha, double min_probability, double doubt, int removes,
    int branches, const uint64_t* secret) {
  if (depth < 2 || depth > MAX_DEPTH) return nullptr;
  try {
    return new Tree({depth, min_match, alpha, min_probability, doubt}, removes, branches, secret);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

EXPORT void sagellm_suffix_tree_free(Tree* tree) { delete tree; }

// Adds a whole sequence. 0, or -1 without memory: the tree is void then.
EXPORT int sagellm_suffix_tree_insert(Tree* tree, const int32_t* tokens, int64_t count) {
  try {
    for (int64_t at = 0; at < count; ++at) tree->append(tokens[at]);
    tree->end_sequence();
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// The number of tokens removed, or -1 without memory.
EXPORT int64_t sagellm_suffix_tree_remove(Tree* tree) {
  try {
    return tree->remove_sequence();
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// Appends tokens, and proposes `most` at most. Their number, or -1 without memory: the tree is void then.
EXPORT int sagellm_suffix_tree_propose(
    Tree* tree, Tree* shared, const int32_t* tokens, int64_t count, uint32_t most, int32_t* proposed,
    double* chances) {
  try {
    for (int64_t at = 0; at < count; ++at) tree->append(tokens[at]);
    const Draft& draft = tree->propose(shared, count, most);
    std::copy_n(draft.tokens, draft.count, proposed);
    std::copy_n(draft.chances, draft.count, chances);
    return draft.count;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// As above, a tree: with the parent of each token.
EXPORT int sagellm_suffix_tree_propose_tree(
    Tree* tree, Tree* shared, const int32_t* tokens, int64_t count, uint32_t most, int32_t* proposed,
    double* chances, uint32_t branches, int32_t* parents) {
  try {
    for (int64_t at = 0; at < count; ++at) tree->append(tokens[at]);
    const Branching& found = tree->propose_tree(shared, count, most, branches);
    std::copy_n(found.tokens, found.count, proposed);
    std::copy_n(found.chances, found.count, chances);
    std::copy_n(found.parents, found.count, parents);
    return found.count;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

EXPORT void sagellm_suffix_tree_sizes(const Tree* tree, int64_t* sizes) {
  sizes[0] = tree->num_tokens();
  sizes[1] = tree->num_nodes();
  sizes[2] = tree->bytes();
}

EXPORT const char* sagellm_suffix_tree_check(Tree* tree) { return tree->check(); }
