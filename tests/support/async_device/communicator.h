// A backend of collectives under NCCL's rules, between processes, through a file that all ranks map.
//
// A collective is a task of the current stream, or with ``async_op`` of the communicator's own stream, and a stream that
// has come to one goes on once all ranks have: nothing else of the rank waits. Each rank's part number n says what it is;
// parts of different collectives, dtypes or sizes are an error on all ranks. The collectives of one communicator run in
// the order of their launches, but no program may rely on that for its memory (`wait_for(.., is_promised=false)`).
// Messages between two ranks have a channel, a stream, and numbers of their own, as torch has them on NCCL.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "operators.h"

namespace async_device {

constexpr int kMaxRanks = 8;
constexpr size_t kPartBytes = size_t(16) << 20;  // of one rank in one collective

// What a rank says of its part.
struct Header {
  char name[32] = {};
  int dtype = 0, detail = 0;     // detail: of a reduction its operation, of a broadcast its root
  int64_t sent[kMaxRanks] = {};  // elements for each rank
  int64_t received[kMaxRanks] = {};
  double start_s = 0;  // of the virtual clock: when this rank has come to it
};

// Of one rank in one channel. Part n + 2 begins after all ranks have read part n: they have begun part n + 1.
struct Mailbox {
  std::atomic<uint64_t> posted, wanted;  // number of the last part; the largest that another rank waits for
  Header headers[2];
  char data[2][kPartBytes];
};

// Of one rank.
struct Board {
  std::atomic<uint64_t> num_steps;
  std::atomic<int> has_left;
  char waits[512];
};

inline std::string text_of(const Header& header) {
  return std::string(header.name) + " " + c10::toString(static_cast<c10::ScalarType>(header.dtype)) + " of " +
         std::to_string(std::accumulate(header.sent, header.sent + kMaxRanks, int64_t(0))) + " elements";
}

// Numbered parts of the ranks of a communicator, or of two of them.
struct Channel {
  std::string name;
  std::vector<Mailbox*> boxes;  // by rank
  std::vector<int> ranks;       // of the communicator
  int place = 0;                // of this rank in both
  Board* boards = nullptr;      // by rank of the communicator
  uint64_t launched = 0;
  EventPtr last;
  int own_stream = -1;
  std::map<uint64_t, EventPtr> pending;  // launched and perhaps not posted

  // One try to carry out part ``number``.
  bool step(uint64_t number, const Header& header, const std::function<void(char*)>& post,
            const std::function<void(const std::vector<char*>&)>& take) {
    auto& mine = *boxes[place];
    if (mine.posted.load() < number) {
      mine.headers[number % 2] = header;
      mine.headers[number % 2].start_s = device().now_s;
      post(mine.data[number % 2]);
      mine.posted.store(number);
      ++device().num_steps;
    }
    bool is_complete = true;
    for (size_t k = 0; k < boxes.size(); ++k) {
      if (boxes[k]->posted.load() >= number) continue;
      is_complete = false;
      if (boxes[k]->wanted.load() < number) boxes[k]->wanted.store(number);
      TORCH_CHECK(!boards[ranks[k]].has_left.load() || boxes[k]->posted.load() >= number, "rank ", ranks[k],
                  " has left communicator ", name, " before part ", number, ", ", text_of(header));
    }
    if (!is_complete) return false;
    std::vector<char*> parts;
    for (size_t k = 0; k < boxes.size(); ++k) {
      const auto& other = boxes[k]->headers[number % 2];
      device().now_s = std::max(device().now_s, other.start_s);
      const bool is_message = std::strcmp(header.name, "send") == 0 || std::strcmp(header.name, "receive") == 0;
      const bool is_same = is_message ? k == size_t(place) || std::strcmp(header.name, other.name) != 0
                                      : std::strcmp(header.name, other.name) == 0;
      TORCH_CHECK(is_same && other.dtype == header.dtype && other.detail == header.detail &&
                      other.sent[place] == header.received[k] && header.sent[k] == other.received[place],
                  "part ", number, " of communicator ", name, " differs: rank ", ranks[place], " has ", text_of(header),
                  ", rank ", ranks[k], " has ", text_of(other));
      // A rank's data are its parts for rank 0, 1, ..
      const auto before = std::accumulate(other.sent, other.sent + place, int64_t(0));
      const auto item_bytes = c10::elementSize(static_cast<c10::ScalarType>(header.dtype));
      parts.push_back(boxes[k]->data[number % 2] + before * item_bytes);
    }
    take(parts);
    return true;
  }

  // Who of the ranks has not come to the first part that is posted here and not complete.
  std::string missing() const {
    const auto number = boxes[place]->posted.load();
    std::string who;
    for (size_t k = 0; k < boxes.size(); ++k)
      if (boxes[k]->posted.load() < number) who += (who.empty() ? "rank " : ", rank ") + std::to_string(ranks[k]);
    return who.empty() ? who : "part " + std::to_string(number) + " of communicator " + name + " waits for " + who;
  }
};

// The channels of this process; the boards of the first communicator, which has all ranks.
struct Process {
  std::vector<Channel*> channels;  // never freed: tasks and threads may hold them
  Board* boards = nullptr;
  int rank = 0, size = 0;
  std::vector<std::pair<Board*, int>> own_boards;   // in each communicator
  std::vector<std::pair<void*, size_t>> mappings;  // start and bytes of each communicator's file
};

inline Process& process() {
  static auto& only = *new Process;
  return only;
}

inline void serve() {
  if (device().is_running) return;
  for (auto* channel : process().channels) {
    auto& mine = *channel->boxes[channel->place];
    auto& pending = channel->pending;
    while (!pending.empty() && mine.posted.load() >= pending.begin()->first) pending.erase(pending.begin());
    const auto wanted = mine.wanted.load();
    while (!pending.empty() && pending.begin()->first <= wanted && mine.posted.load() < pending.begin()->first &&
           advance(pending.begin()->second)) {
    }
  }
  if (process().boards) process().boards[process().rank].num_steps.store(device().num_steps.load());
}

// A thread that serves other ranks while this rank's host does something else.
inline void start_server() {
  static bool is_started = false;
  if (is_started) return;
  is_started = true;
  serve_other_ranks = serve;
  publish_wait = [](const std::string& what) {
    if (!process().boards) return;
    std::string text = what;
    for (auto* channel : process().channels)
      if (auto missing = channel->missing(); !missing.empty()) text += (text.empty() ? "" : "; ") + missing;
    auto* board = process().boards[process().rank].waits;
    strncpy(board, what.empty() ? "" : text.c_str(), sizeof(Board::waits) - 1);
  };
  steps_of_all_ranks = [] {
    auto& p = process();
    if (!p.boards) return device().num_steps.load();
    p.boards[p.rank].num_steps.store(device().num_steps.load());
    uint64_t sum = 0;
    for (int rank = 0; rank < p.size; ++rank) sum += p.boards[rank].num_steps.load();
    return sum;
  };
  waits_of_all_ranks = [] {
    std::string text;
    auto& p = process();
    for (int rank = 0; p.boards && rank < p.size; ++rank)
      text += "rank " + std::to_string(rank) + ": " +
              (p.boards[rank].waits[0] ? p.boards[rank].waits : "its host does not wait for the device") + "\n";
    return text;
  };
  std::thread([] {
    while (true) {
      std::this_thread::sleep_for(std::chrono::microseconds(300));
      if (!device().mutex.try_lock()) continue;  // whoever has it serves too, if it waits
      serve();
      device().mutex.unlock();
    }
  }).detach();
}

struct DeviceWork final : c10d::Work {
  EventPtr done;
  std::vector<Tensor> kept;  // until somebody waits
  DeviceWork(EventPtr done, std::vector<Tensor> kept) : done(std::move(done)), kept(std::move(kept)) {}
  bool isCompleted() override { return done->is_done; }
  bool isSuccess() const override { return device().error.empty(); }
  void synchronize() override {
    Lock lock;
    raise_error();
    wait_for(current_stream, done);
    kept.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void abort() override {}
};

inline void require(bool holds, const char* rule) { TORCH_CHECK(holds, "NCCL's rule is broken: ", rule); }

class Communicator final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<Tensor>;

  Communicator(std::string name, const std::string& path, int rank, int size)
      : c10d::Backend(rank, size), name_(std::move(name)) {
    TORCH_CHECK(size <= kMaxRanks, "at most ", kMaxRanks, " ranks");
    const size_t num_boxes = size + size * (size - 1), num_bytes = num_boxes * sizeof(Mailbox) + size * sizeof(Board);
    const int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
    TORCH_CHECK(file >= 0 && ftruncate(file, num_bytes) == 0, "cannot make ", path);
    void* start = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    TORCH_CHECK(start != MAP_FAILED, "cannot map ", path);
    auto* boxes = static_cast<Mailbox*>(start);
    boards_ = reinterpret_cast<Board*>(boxes + num_boxes);
    Lock lock;
    auto& p = process();
    if (!p.boards) p.boards = boards_, p.rank = rank, p.size = size;
    p.own_boards.emplace_back(boards_, rank);
    p.mappings.emplace_back(start, num_bytes);
    std::vector<int> all(size);
    std::iota(all.begin(), all.end(), 0);
    all_ = add_channel(boxes, all, rank, name_);
    auto* next = boxes + size;
    for (int low = 0; low < size; ++low)
      for (int high = low + 1; high < size; ++high, next += 2)
        if (rank == low || rank == high)
          pairs_[rank == low ? high : low] = add_channel(next, {low, high}, rank == high, name_ + " (messages)");
    start_server();
  }

  const std::string getBackendName() const override { return "async_device"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds) override {}

  WorkPtr _allgather_base(Tensor& full, Tensor& shard, const c10d::AllgatherOptions& opts) override {
    require(full.numel() == shard.numel() * size_, "the result has the elements of all ranks");
    if (full.storage().data() == shard.storage().data())
      require(start(shard) == start(full) + rank_ * shard.nbytes(), "in place: the shard is the rank's part");
    return gather(split(full), shard, opts.asyncOp);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& full, Tensors& shards, const c10d::AllgatherOptions& opts) override {
    ++device().counts["coalesced"];
    WorkPtr work;
    for (size_t k = 0; k < full.size(); ++k) work = _allgather_base(full[k], shards[k], opts);
    return work;
  }
  WorkPtr allgather(std::vector<Tensors>& full, Tensors& shards, const c10d::AllgatherOptions& opts) override {
    return gather(full[0], shards[0], opts.asyncOp);
  }
  WorkPtr _reduce_scatter_base(Tensor& shard, Tensor& full, const c10d::ReduceScatterOptions& opts) override {
    require(full.numel() == shard.numel() * size_, "the buffer has the elements of all ranks");
    return reduced("reduce_scatter", split(full), shard, opts.reduceOp, opts.asyncOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& shards, Tensors& full,
                                          const c10d::ReduceScatterOptions& opts) override {
    WorkPtr work;
    for (size_t k = 0; k < full.size(); ++k) work = _reduce_scatter_base(shards[k], full[k], opts);
    return work;
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return reduced("all_reduce", Tensors(size_, tensors[0]), tensors[0], opts.reduceOp, opts.asyncOp);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const auto nothing = tensors[0].view(-1).narrow(0, 0, 0);
    Tensors sent(size_, nothing);
    sent[opts.rootRank] = tensors[0];
    return reduced("reduce", sent, rank_ == opts.rootRank ? tensors[0] : nothing, opts.reduceOp, opts.asyncOp);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const auto nothing = tensors[0].view(-1).narrow(0, 0, 0);
    const bool is_root = rank_ == opts.rootRank;
    Tensors received(size_, nothing);
    if (!is_root) received[opts.rootRank] = tensors[0];
    Tensors sent(size_, is_root ? tensors[0] : nothing);
    sent[rank_] = nothing;
    return exchange(*all_, "broadcast", received, sent, opts.asyncOp, opts.rootRank);
  }
  WorkPtr scatter(Tensors& received, std::vector<Tensors>& sent, const c10d::ScatterOptions& opts) override {
    const auto nothing = received[0].view(-1).narrow(0, 0, 0);
    Tensors from(size_, nothing);
    from[opts.rootRank] = received[0];
    return exchange(*all_, "scatter", from, rank_ == opts.rootRank ? sent[0] : Tensors(size_, nothing), opts.asyncOp,
                    opts.rootRank);
  }
  WorkPtr alltoall(Tensors& received, Tensors& sent, const c10d::AllToAllOptions& opts) override {
    return exchange(*all_, "all_to_all", received, sent, opts.asyncOp);
  }
  WorkPtr alltoall_base(Tensor& received, Tensor& sent, std::vector<int64_t>& received_rows,
                        std::vector<int64_t>& sent_rows, const c10d::AllToAllOptions& opts) override {
    auto parts = [&](const Tensor& tensor, const std::vector<int64_t>& rows) {
      return rows.empty() ? split(tensor) : tensor.split_with_sizes(rows);
    };
    return exchange(*all_, "all_to_all", parts(received, received_rows), parts(sent, sent_rows), opts.asyncOp);
  }
  WorkPtr send(Tensors& tensors, int to, int) override {
    const int place = to > rank_;
    Tensors sent(2, tensors[0].view(-1).narrow(0, 0, 0)), received = sent;
    sent[place] = tensors[0];
    return exchange(*pairs_.at(to), "send", received, sent, true);
  }
  WorkPtr recv(Tensors& tensors, int from, int) override {
    const int place = from > rank_;
    Tensors sent(2, tensors[0].view(-1).narrow(0, 0, 0)), received = sent;
    received[place] = tensors[0];
    return exchange(*pairs_.at(from), "receive", received, sent, true);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    auto token = at::zeros({1}, at::dtype(at::kInt).device(c10::Device(kDevice, 0)));
    reduced("barrier", Tensors(size_, token), token, c10d::ReduceOp::SUM, false);
    synchronize_device();
    return c10::make_intrusive<DeviceWork>(all_->last, Tensors());
  }

 private:
  static char* start(const Tensor& tensor) {
    return static_cast<char*>(tensor.unsafeGetTensorImpl()->mutable_data());
  }

  Channel* add_channel(Mailbox* boxes, std::vector<int> ranks, int place, const std::string& name) {
    auto* channel = new Channel;
    for (size_t k = 0; k < ranks.size(); ++k) channel->boxes.push_back(boxes + k);
    channel->name = name;
    channel->ranks = std::move(ranks);
    channel->place = place;
    channel->boards = boards_;
    process().channels.push_back(channel);
    return channel;
  }

  Tensors split(const Tensor& tensor) const {
    auto flat = tensor.view(-1);
    Tensors parts;
    for (int rank = 0; rank < size_; ++rank)
      parts.push_back(flat.narrow(0, rank * (flat.numel() / size_), flat.numel() / size_));
    return parts;
  }

  static void check(const Tensor& tensor, c10::ScalarType dtype) {
    require(is_ours(tensor), "tensors are on the device");
    require(tensor.is_contiguous(), "tensors are contiguous");
    require(tensor.scalar_type() == dtype, "tensors have one dtype");
    require(!tensor.numel() || tensor.storage().data(), "tensors have memory");
    // It copies elements one by one elsewhere. Small messages need not be fast.
    require(tensor.nbytes() <= 1024 || reinterpret_cast<uintptr_t>(start(tensor)) % 16 == 0, "aligned to 16 bytes");
  }

  WorkPtr gather(const Tensors& parts, const Tensor& shard, bool async_op) {
    return exchange(*all_, "all_gather", parts, Tensors(size_, shard), async_op);
  }

  // Send sent[r] to each rank r, and receive received[r].
  WorkPtr exchange(Channel& channel, const char* name, const Tensors& received, const Tensors& sent, bool async_op,
                   int detail = 0) {
    std::vector<std::pair<char*, size_t>> targets;
    for (auto& tensor : received) targets.emplace_back(start(tensor), tensor.nbytes());
    auto take = [targets](const std::vector<char*>& parts) {
      for (size_t k = 0; k < parts.size(); ++k) std::memcpy(targets[k].first, parts[k], targets[k].second);
    };
    return begin(channel, name, received, sent, async_op, detail, take);
  }

  // Reduce sent[r] of all ranks to the result of rank r, in the order of ranks; 16 bits are summed in 32.
  WorkPtr reduced(const char* name, const Tensors& sent, const Tensor& result, const c10d::ReduceOp& op, bool async_op) {
    const auto kind = static_cast<c10d::ReduceOp::RedOpType>(op);
    require(kind == c10d::ReduceOp::SUM || kind == c10d::ReduceOp::AVG || kind == c10d::ReduceOp::MIN ||
                kind == c10d::ReduceOp::MAX || kind == c10d::ReduceOp::PRODUCT,
            "the reduction is sum, mean, minimum, maximum or product");
    auto take = [kind, target = on_cpu(result).view(-1)](const std::vector<char*>& parts) mutable {
      const bool is_half = target.scalar_type() == at::kBFloat16 || target.scalar_type() == at::kHalf;
      Tensor total;
      for (auto* part : parts) {
        auto values = at::from_blob(part, {target.numel()}, target.options());
        if (is_half) values = values.to(at::kFloat);
        if (!total.defined()) total = values.clone();
        else if (kind == c10d::ReduceOp::MIN) total = at::minimum(total, values);
        else if (kind == c10d::ReduceOp::MAX) total = at::maximum(total, values);
        else if (kind == c10d::ReduceOp::PRODUCT) total.mul_(values);
        else total.add_(values);
      }
      if (kind == c10d::ReduceOp::AVG) total.div_(static_cast<int64_t>(parts.size()));
      target.copy_(total);
    };
    return begin(*all_, name, Tensors(size_, result), sent, async_op, static_cast<int>(kind), take);
  }

  WorkPtr begin(Channel& channel, const char* name, const Tensors& received, const Tensors& sent, bool async_op,
                int detail, std::function<void(const std::vector<char*>&)> take) {
    Header header;
    strncpy(header.name, name, sizeof(header.name) - 1);
    const auto dtype = received[0].scalar_type();
    header.dtype = static_cast<int>(dtype);
    header.detail = detail;
    std::vector<Range> ranges;
    std::vector<std::pair<char*, size_t>> sources;
    Tensors kept;
    size_t num_bytes = 0;
    for (size_t k = 0; k < sent.size(); ++k) {
      check(sent[k], dtype);
      check(received[k], dtype);
      header.sent[k] = sent[k].numel();
      header.received[k] = received[k].numel();
      ranges.push_back(range_of(sent[k], false));
      ranges.push_back(range_of(received[k], true));
      sources.emplace_back(start(sent[k]), sent[k].nbytes());
      num_bytes += sent[k].nbytes();
      kept.insert(kept.end(), {sent[k], received[k]});
    }
    TORCH_CHECK(num_bytes <= kPartBytes, "a collective of more than ", kPartBytes, " bytes");
    auto post = [sources](char* into) {
      for (auto& [from, count] : sources) {
        std::memcpy(into, from, count);
        into += count;
      }
    };
    Lock lock;
    raise_error();
    int stream = current_stream;
    if (async_op) {
      if (channel.own_stream < 0) channel.own_stream = new_stream();
      wait_for(channel.own_stream, record(stream));
      stream = channel.own_stream;
    }
    if (channel.last) wait_for(stream, channel.last, /*is_promised=*/false);
    const auto number = ++channel.launched;
    const auto title = std::string(name) + (async_op ? " (async)" : "");
    launch(stream, title, ranges, [&channel, number, header, post, take] {
      return channel.step(number, header, post, take);
    });
    channel.last = record(stream);
    channel.pending[number] = channel.last;
    if (!async_op) return nullptr;
    return c10::make_intrusive<DeviceWork>(channel.last, std::move(kept));
  }

  std::string name_;
  Board* boards_ = nullptr;
  Channel* all_ = nullptr;
  std::map<int, Channel*> pairs_;  // by the other rank
};

}  // namespace async_device
