// Streams of the simulated device: queues of tasks that the host fills, and an order in which they run.
//
// A task runs in the thread that advances the device: at a launch, as the order says, when the host waits for it, or
// when another rank waits for a collective of this rank (`serve_other_ranks`). There is no other concurrency, so runs with
// equal seeds are equal, up to the moment at which other ranks arrive in a collective.
#pragma once

#include <ATen/ATen.h>
#include <torch/extension.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace async_device {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// How much of each stream's work is surely done: the number of its last task. Missing entries are 0.
using Clock = std::vector<uint64_t>;

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t s = 0; s < other.size(); ++s) into[s] = std::max(into[s], other[s]);
}

inline uint64_t at_stream(const Clock& clock, int stream) {
  return stream < static_cast<int>(clock.size()) ? clock[stream] : 0;
}

// A point in a stream's work.
struct Event {
  int stream;
  Clock clock;
  bool is_done = false;
  double time_s = 0;  // of the virtual clock, once it is done
};
using EventPtr = std::shared_ptr<Event>;

struct Task {
  std::string name;
  std::function<bool()> step;  // false: waits for other ranks, and must be called again
  EventPtr waits_for, reaches;
};

enum class Order { Early, Late, SidesFirst, SidesLast, Random };

struct Device {
  std::recursive_mutex mutex;
  std::vector<std::deque<Task>> queues{1};
  std::vector<Clock> clocks{1};
  std::vector<int> weights{1};  // how often `Order::Random` chooses a stream; 0: only if somebody waits for it
  Clock host;                   // what the host has waited for
  Order order = Order::Early;
  std::mt19937 random{0};
  bool is_running = false;
  // A virtual clock: a task lasts as long as `durations_s` says by its name (0 if it has no entry), whatever the order in
  // which tasks happen to run. The host takes no time.
  std::map<std::string, double> durations_s;
  std::vector<double> times_s{0};  // of each stream: the end of its last task
  double now_s = 0;                // the start of the running task
  std::string error;  // a task's; every later call raises it, as after an error of a GPU
  std::vector<std::string> hazards;
  std::map<std::string, int64_t> counts;  // launches by name, and "sync NAME" where the host waits
  std::atomic<uint64_t> num_steps{0};
  double patience_s = 60;
};

inline Device& device() {
  static auto& only = *new Device;  // never destroyed: a thread may still use it at exit
  return only;
}

inline thread_local int current_stream = 0;

// The device's mutex. A thread that waits for it gives up Python's lock, which a running task may need.
struct Lock {
  Lock() {
    auto& mutex = device().mutex;
    if (mutex.try_lock()) return;
    if (Py_IsInitialized() && PyGILState_Check()) {
      auto* state = PyEval_SaveThread();
      mutex.lock();
      PyEval_RestoreThread(state);
    } else {
      mutex.lock();
    }
  }
  ~Lock() { device().mutex.unlock(); }
  Lock(const Lock&) = delete;
};

inline void raise_error() { TORCH_CHECK(device().error.empty(), device().error); }

// Run the first task of a stream; false if it cannot go on.
inline bool run_first(int stream) {
  auto& d = device();
  auto& queue = d.queues[stream];
  if (queue.empty() || d.is_running) return false;
  Task& task = queue.front();
  if (task.waits_for && !task.waits_for->is_done) return false;
  d.now_s = std::max(d.times_s[stream], task.waits_for ? task.waits_for->time_s : 0.0);
  if (task.step) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard no_modes(c10::DispatchKeySet(
        {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::AutocastCPU,
         c10::DispatchKey::AutocastPrivateUse1}));
    d.is_running = true;
    bool is_done = true;
    try {
      is_done = task.step();
    } catch (const c10::Error& error) {
      if (d.error.empty()) d.error = "the device failed in " + task.name + ": " + error.what_without_backtrace();
    } catch (const std::exception& error) {
      if (d.error.empty()) d.error = "the device failed in " + task.name + ": " + error.what();
    }
    d.is_running = false;
    if (!is_done) return false;
  }
  Task done = std::move(queue.front());
  queue.pop_front();
  const auto duration = d.durations_s.find(done.name);
  d.times_s[stream] = d.now_s + (duration == d.durations_s.end() ? 0.0 : duration->second);
  if (done.reaches) done.reaches->is_done = true, done.reaches->time_s = d.times_s[stream];
  ++d.num_steps;
  return true;
}

// Run what the order lets run now.
inline void pump() {
  auto& d = device();
  if (d.is_running || d.order == Order::Late) return;
  if (d.order == Order::Random) {
    const int total = std::accumulate(d.weights.begin(), d.weights.end(), 0);
    while (total && d.random() % 100 < 60) {
      int pick = d.random() % total, stream = 0;
      while (pick >= d.weights[stream]) pick -= d.weights[stream++];
      run_first(stream);
    }
    return;
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t stream = 0; stream < d.queues.size(); ++stream) {
      if (d.order == Order::SidesFirst && stream == 0) continue;
      if (d.order == Order::SidesLast && stream != 0) continue;
      while (run_first(stream)) moved = true;
    }
  }
}

inline EventPtr record(int stream) {
  auto& d = device();
  auto event = std::make_shared<Event>(Event{stream, d.clocks[stream]});
  d.queues[stream].push_back(Task{"record", nullptr, nullptr, event});
  pump();
  return event;
}

// Let later tasks of a stream run after the event. ``is_promised``: whether a program may rely on that.
inline void wait_for(int stream, const EventPtr& event, bool is_promised = true) {
  auto& d = device();
  if (is_promised) join(d.clocks[stream], event->clock);
  d.queues[stream].push_back(Task{"wait", nullptr, event, nullptr});
  pump();
}

inline int new_stream() {
  auto& d = device();
  d.queues.emplace_back();
  d.clocks.emplace_back();
  d.times_s.push_back(0);
  static const int choices[] = {0, 1, 1, 4};
  d.weights.push_back(choices[d.random() % 4]);
  return static_cast<int>(d.queues.size()) - 1;
}

// Run one task that must run before the event; false if all of them wait for other ranks.
inline bool advance(const EventPtr& event) {
  auto& d = device();
  auto target = event;
  while (!target->is_done) {
    auto& first = d.queues[target->stream].front();
    if (!first.waits_for || first.waits_for->is_done) return run_first(target->stream);
    target = first.waits_for;
  }
  return false;
}

// The task that an event waits for in the end.
inline std::string blocker(const EventPtr& event) {
  auto& d = device();
  auto target = event;
  while (true) {
    auto& queue = d.queues[target->stream];
    if (queue.empty()) return "nothing";
    if (!queue.front().waits_for || queue.front().waits_for->is_done)
      return "stream " + std::to_string(target->stream) + ", at " + queue.front().name;
    target = queue.front().waits_for;
  }
}

// Set by communicator.h: serve what other ranks wait for, and say what they wait for.
inline std::function<void()> serve_other_ranks = [] {};
inline std::function<void(const std::string&)> publish_wait = [](const std::string&) {};
inline std::function<uint64_t()> steps_of_all_ranks = [] { return device().num_steps.load(); };
inline std::function<std::string()> waits_of_all_ranks = [] { return std::string(); };

// Block the host until an event. Raises if no rank goes on for `patience_s`.
inline void synchronize(const EventPtr& event) {
  auto& d = device();
  using Time = std::chrono::steady_clock;
  auto last_step = Time::now();
  uint64_t last_steps = 0;
  bool is_published = false;
  while (true) {
    {
      Lock lock;
      raise_error();
      while (!event->is_done && advance(event)) raise_error();
      raise_error();
      if (event->is_done) {
        join(d.host, event->clock);
        if (is_published) publish_wait("");
        return;
      }
      serve_other_ranks();
      publish_wait(blocker(event));
      is_published = true;
    }
    const auto steps = steps_of_all_ranks();
    if (steps != last_steps) last_steps = steps, last_step = Time::now();
    if (std::chrono::duration<double>(Time::now() - last_step).count() > d.patience_s) {
      Lock lock;
      d.error = "deadlock: for " + std::to_string(d.patience_s) + " s no rank went on\n" + waits_of_all_ranks();
      raise_error();
    }
    if (PyGILState_Check()) {
      auto* state = PyEval_SaveThread();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      PyEval_RestoreThread(state);
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

inline void synchronize_stream(int stream) {
  EventPtr event;
  {
    Lock lock;
    raise_error();
    event = record(stream);
  }
  synchronize(event);
}

inline void synchronize_device() {
  std::vector<int> streams(device().queues.size());
  std::iota(streams.begin(), streams.end(), 0);
  std::shuffle(streams.begin(), streams.end(), device().random);
  for (int stream : streams) synchronize_stream(stream);
}

}  // namespace async_device
