// Memory of the simulated device, under the rule of cudaMallocAsync: a block belongs to the stream on which it was
// allocated, and a free is work of that stream. So at the free, the stream must have waited for every other stream that
// uses the block. CUDA's native allocator only requires this at the stream's next allocation.
//
// Two things make a missing wait visible. A freed block becomes NaN (of 8-bit codes: 255) at this place in its stream's
// work, and so does new memory. And every access and every free is compared with the earlier accesses of the same bytes:
// one that is not ordered behind them by events is a hazard, whatever the order in which tasks happen to run.
#pragma once

#include <sys/mman.h>

#include "streams.h"

namespace async_device {

struct Range {
  char *low, *high;
  bool is_write;
};

struct Use {
  char *low, *high;
  bool is_write;
  int stream;
  uint64_t tick;
  std::string name;
};

struct Block {
  size_t num_bytes;
  int pool;
  bool is_free = false, is_shared = false;
  std::vector<Use> uses;
};

struct Memory {
  char* arena = nullptr;
  size_t used = 0;
  std::map<char*, Block> blocks;                             // by address; for life
  std::map<int, std::multimap<size_t, char*>> free_by_pool;  // by size
  std::map<char*, size_t> pinned;                            // of the host
};

inline Memory& memory() {
  static auto& only = *new Memory;
  return only;
}

constexpr size_t kArenaBytes = size_t(64) << 30;  // of addresses; pages are taken at their first use

inline Block* block_of(const char* address) {
  auto& blocks = memory().blocks;
  auto next = blocks.upper_bound(const_cast<char*>(address));
  if (next == blocks.begin()) return nullptr;
  auto& [start, block] = *std::prev(next);
  return address < start + block.num_bytes ? &block : nullptr;
}

inline void add_hazard(const std::string& text) {
  auto& hazards = device().hazards;
  if (hazards.size() < 100) hazards.push_back(text);
}

// Compare an access, the next task of a stream, with the earlier ones, and note it.
inline void note_access(const std::string& name, int stream, const Range& range) {
  if (range.low == range.high) return;
  auto* block = block_of(range.low);
  if (!block) return;
  if (block->is_free) add_hazard(name + " uses memory that was freed");
  const Clock& clock = device().clocks[stream];
  std::vector<Use> kept;
  for (auto& use : block->uses) {
    const bool meet = use.low < range.high && range.low < use.high;
    if (meet && (use.is_write || range.is_write) && use.stream != stream && at_stream(clock, use.stream) < use.tick)
      add_hazard(name + " on stream " + std::to_string(stream) + (range.is_write ? " writes" : " reads") + " what " +
                 use.name + " on stream " + std::to_string(use.stream) + (use.is_write ? " writes" : " reads"));
    const bool is_covered = range.low <= use.low && use.high <= range.high;
    const bool is_repeated = is_covered && use.stream == stream && !use.is_write && !range.is_write;
    if (!(is_covered && range.is_write) && !is_repeated) kept.push_back(std::move(use));
  }
  kept.push_back(Use{range.low, range.high, range.is_write, stream, at_stream(clock, stream), name});
  block->uses = std::move(kept);
}

// The next task of a stream. It is launched after whatever the host has waited for.
inline void tick(int stream) {
  auto& clock = device().clocks[stream];
  join(clock, device().host);
  if (clock.size() <= static_cast<size_t>(stream)) clock.resize(stream + 1);
  ++clock[stream];
}

// Queue a task with what it reads and writes.
inline void launch(int stream, std::string name, const std::vector<Range>& ranges, std::function<bool()> step) {
  auto& d = device();
  raise_error();
  tick(stream);
  for (auto& range : ranges)
    if (!range.is_write) note_access(name, stream, range);
  for (auto& range : ranges)
    if (range.is_write) note_access(name, stream, range);
  ++d.counts[name];
  d.queues[stream].push_back(Task{std::move(name), std::move(step), nullptr, nullptr});
  pump();
}

// Queue a task that sets bytes to 255, NaN in every floating dtype. It raises nothing: destructors free memory.
inline void clear(int stream, char* start, size_t num_bytes) {
  tick(stream);
  device().queues[stream].push_back(Task{"clear", [=] {
                                           std::memset(start, 0xFF, num_bytes);
                                           return true;
                                         },
                                         nullptr, nullptr});
  pump();
}

inline void* allocate(size_t num_bytes) {
  if (!num_bytes) return nullptr;
  Lock lock;
  auto& m = memory();
  const int pool = current_stream;
  raise_error();
  num_bytes = (num_bytes + 511) / 512 * 512;
  auto& free_blocks = m.free_by_pool[pool];
  auto found = free_blocks.lower_bound(num_bytes);
  if (found != free_blocks.end() && found->first <= 2 * num_bytes) {
    char* start = found->second;
    free_blocks.erase(found);
    m.blocks[start].is_free = false;
    return start;
  }
  if (!m.arena) {
    void* arena = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(arena != MAP_FAILED, "no addresses for the device's memory");
    m.arena = static_cast<char*>(arena);
  }
  TORCH_CHECK(m.used + num_bytes <= kArenaBytes, "the device is out of memory");
  char* start = m.arena + m.used;
  m.used += num_bytes;
  m.blocks[start] = Block{num_bytes, pool};
  clear(pool, start, num_bytes);
  return start;
}

inline void release(void* address) {
  if (!address) return;
  Lock lock;
  auto& m = memory();
  auto* start = static_cast<char*>(address);
  auto& block = m.blocks.at(start);
  block.is_free = true;
  if (block.is_shared) return;  // `record_stream`: it would be free once those streams are done; here it is not reused
  const int pool = block.pool;
  auto& clock = device().clocks[pool];
  join(clock, device().host);
  for (auto& use : block.uses)
    if (use.stream != pool && at_stream(clock, use.stream) < use.tick)
      add_hazard("memory of stream " + std::to_string(pool) + " is freed, and " + use.name + " on stream " +
                 std::to_string(use.stream) + " still uses it");
  block.uses.clear();
  clear(pool, start, block.num_bytes);
  m.free_by_pool[pool].emplace(block.num_bytes, start);
}

// `record_stream` of a block.
inline void share(const void* address, int stream) {
  Lock lock;
  auto* block = block_of(static_cast<const char*>(address));
  if (block && block->pool != stream) block->is_shared = true;
  ++device().counts["record_stream"];
}

inline bool is_pinned(const void* address) {
  Lock lock;
  auto& pinned = memory().pinned;
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto next = pinned.upper_bound(at);
  if (next == pinned.begin()) return false;
  auto& [start, num_bytes] = *std::prev(next);
  return at < start + num_bytes;
}

inline void* allocate_pinned(size_t num_bytes) {
  if (!num_bytes) return nullptr;
  num_bytes = (num_bytes + 63) / 64 * 64;
  void* start = aligned_alloc(64, num_bytes);
  TORCH_CHECK(start, "the host is out of memory");
  std::memset(start, 0xFF, num_bytes);
  Lock lock;
  memory().pinned[static_cast<char*>(start)] = num_bytes;
  memory().blocks[static_cast<char*>(start)] = Block{num_bytes, -1};
  return start;
}

inline void release_pinned(void* address) {
  if (!address) return;
  Lock lock;
  memory().pinned.erase(static_cast<char*>(address));
  memory().blocks.erase(static_cast<char*>(address));
  free(address);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* start = async_device::allocate(num_bytes);
    return {start, start, &release, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* into, const void* from, std::size_t num_bytes) const override {
    auto *low = static_cast<char*>(into), *source = static_cast<char*>(const_cast<void*>(from));
    Lock lock;
    launch(current_stream, "copy_data", {{source, source + num_bytes, false}, {low, low + num_bytes, true}}, [=] {
      std::memcpy(into, from, num_bytes);
      return true;
    });
  }
};

inline DeviceAllocator& device_allocator() {
  static auto& only = *new DeviceAllocator;
  return only;
}

}  // namespace async_device
