// SPDX-License-Identifier: MIT
// Memory comes from the driver's virtual memory management, so that one allocation is mapped here
// and by peers, whose copy engines read it through NVLink where there is one, and is imported into
// Vulkan as an opaque file descriptor. Copies run on streams, away from all Vulkan queues.

#include "engine/runtime/interop/cuda_memory.hpp"
#include "link_driver.hpp"
#include "world/deadline.hpp"

#include <bellows/base/error.hpp>

#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace bellows {
namespace {

using namespace cuda;

/// An allocation as copies see it.
class Mapped final : public LinkMemory {
public:
    explicit Mapped(std::unique_ptr<cuda::Memory> memory) : memory_(std::move(memory)) {
        bytes_ = memory_->bytes();
        address_ = memory_->address();
    }

private:
    std::unique_ptr<cuda::Memory> memory_;
};

/// Streams, and events that copies use one after the other.
struct Queues {
    explicit Queues(CardPtr of) : card(std::move(of)) {}
    ~Queues() {
        const Driver& driver = *card->driver;
        if (driver.push_context(card->context) != kSuccess)
            return;
        for (const Event event : events)
            driver.destroy_event(event);
        for (const auto& [queue, stream] : streams)
            driver.destroy_stream(stream);
        Context left = nullptr;
        driver.pop_context(&left);
    }
    Queues(const Queues&) = delete;
    Queues& operator=(const Queues&) = delete;

    Stream stream(std::size_t queue) {
        const std::scoped_lock lock(mutex);
        Stream& found = streams[queue];
        if (found == nullptr)
            card->driver->check(card->driver->create_stream(&found, kNonBlocking),
                                "making a stream");
        return found;
    }
    Event take_event() {
        const std::scoped_lock lock(mutex);
        if (!events.empty()) {
            const Event event = events.back();
            events.pop_back();
            return event;
        }
        Event made = nullptr;
        card->driver->check(card->driver->create_event(&made, kNoTiming), "making an event");
        return made;
    }
    void give_back(Event event) {
        const std::scoped_lock lock(mutex);
        events.push_back(event);
    }

    CardPtr card;
    std::mutex mutex;
    std::map<std::size_t, Stream> streams;
    std::vector<Event> events; ///< that nobody uses
};

class CudaCopy final : public LinkCopy {
public:
    CudaCopy(std::shared_ptr<Queues> queues, std::size_t queue,
             const std::vector<LinkRange>& ranges)
        : queues_(std::move(queues)) {
        const Driver& driver = *queues_->card->driver;
        const Current current(*queues_->card);
        const Stream stream = queues_->stream(queue);
        event_ = queues_->take_event();
        Result result = kSuccess;
        for (const LinkRange& range : ranges)
            if (range.bytes > 0 && result == kSuccess)
                result = driver.copy(range.to, range.from, range.bytes, stream);
        const Result recorded = driver.record_event(event_, stream);
        if (result == kSuccess && recorded == kSuccess)
            return;
        leave(); // what has begun
        driver.check(result, "copying from a peer's memory");
        driver.check(recorded, "recording an event");
    }
    ~CudaCopy() override {
        const Driver& driver = *queues_->card->driver;
        if (driver.push_context(queues_->card->context) != kSuccess)
            return;
        leave();
        Context left = nullptr;
        driver.pop_context(&left);
    }

    bool done() override {
        if (done_)
            return true;
        const Driver& driver = *queues_->card->driver;
        const Current current(*queues_->card);
        const Result result = driver.query_event(event_);
        if (result == kNotReady)
            return false;
        driver.check(result, "waiting for copies from a peer's memory");
        return done_ = true;
    }

private:
    /// Waits for what has begun. The event is given back unless something still uses it.
    void leave() noexcept {
        const Driver& driver = *queues_->card->driver;
        const Deadline deadline(Milliseconds{10'000});
        Result result = done_ ? kSuccess : driver.query_event(event_);
        while (result == kNotReady && !deadline.expired()) {
            std::this_thread::yield();
            result = driver.query_event(event_);
        }
        if (result == kSuccess)
            queues_->give_back(event_);
    }

    std::shared_ptr<Queues> queues_;
    Event event_ = nullptr;
    bool done_ = false;
};

class CudaLinkDriver final : public LinkDriver {
public:
    CudaLinkDriver(CardPtr card, std::string uuid)
        : card_(std::move(card)), uuid_(std::move(uuid)), queues_(std::make_shared<Queues>(card_)) {
    }

    std::string_view name() const noexcept override { return "cuda"; }
    std::string device_id() const override { return "cuda " + uuid_; }

    bool reaches(std::string_view device_id) const override {
        for (const auto& [uuid, device] : card_->devices) {
            int can = 0;
            if (device_id == "cuda " + uuid)
                return device == card_->device ||
                       (card_->driver->can_access_peer(&can, card_->device, device) == kSuccess &&
                        can != 0);
        }
        return false;
    }

    LinkAllocation allocate(std::uint64_t bytes) override {
        auto memory = cuda::Memory::allocate(card_, bytes);
        FileDescriptor file(memory->export_file());
        return {std::make_shared<Mapped>(std::move(memory)), std::move(file), {}};
    }

    std::shared_ptr<LinkMemory> open(FileDescriptor file, std::uint64_t bytes) override {
        return std::make_shared<Mapped>(cuda::Memory::open(card_, file.get(), bytes));
    }

    std::unique_ptr<LinkCopy> copy(std::size_t queue, std::vector<LinkRange> ranges) override {
        return std::make_unique<CudaCopy>(queues_, queue, ranges);
    }

private:
    CardPtr card_;
    std::string uuid_;
    std::shared_ptr<Queues> queues_;
};

/// Tries all of it once, so that what does not work is found before anybody counts on it.
void try_out(CudaLinkDriver& driver) {
    LinkAllocation source = driver.allocate(1);
    const LinkAllocation target = driver.allocate(1);
    const std::uint64_t bytes = source.memory->bytes();
    const auto opened = driver.open(std::move(source.file), bytes);
    const auto copy = driver.copy(0, {{target.memory->address(), opened->address(), bytes}});
    const Deadline deadline(Milliseconds{10'000});
    while (!copy->done()) {
        if (deadline.expired())
            throw Error(ErrorCode::Timeout, "a first copy through libcuda.so.1 does not end");
        std::this_thread::yield();
    }
}

} // namespace

std::unique_ptr<LinkDriver> make_cuda_link_driver(const std::string& device_uuid,
                                                  std::string& why_not) {
    try {
        const CardPtr card = Card::open(device_uuid, why_not);
        if (!card)
            return nullptr;
        auto made = std::make_unique<CudaLinkDriver>(card, device_uuid);
        try_out(*made);
        return made;
    } catch (const Error& error) {
        why_not = error.message();
        return nullptr;
    }
}

} // namespace bellows
