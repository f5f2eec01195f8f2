// SPDX-License-Identifier: MIT
// Memory comes from the driver's virtual memory management, so that one allocation is mapped here
// and by peers, whose copy engines read it through NVLink where there is one, and is imported into
// Vulkan as an opaque file descriptor. Copies run on streams, away from all Vulkan queues.

#include "cuda_driver.hpp"
#include "link_driver.hpp"
#include "world/deadline.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/engine/memory.hpp>

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace bellows {
namespace {

using namespace cuda;

std::string hex(const Uuid& uuid) {
    constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (const unsigned char byte : uuid.bytes) {
        text += kDigits[byte >> 4];
        text += kDigits[byte & 15];
    }
    return text;
}

/// The device's primary context, and what is the same for all of its memory.
struct Card {
    std::shared_ptr<const Driver> driver;
    Ordinal device = -1;
    Context context = nullptr;
    std::map<std::string, Ordinal> devices; ///< all that this process sees, by UUID
    std::uint64_t granularity = 0;

    Card() = default;
    Card(const Card&) = delete;
    Card& operator=(const Card&) = delete;
    ~Card() {
        if (context != nullptr)
            driver->release_context(device);
    }

    AllocationProperties properties() const {
        AllocationProperties made{};
        made.type = kPinned;
        made.handle_types = kFileDescriptor;
        made.location = {kOnDevice, device};
        return made;
    }
};
using CardPtr = std::shared_ptr<const Card>;

/// Makes the card's context this thread's, for a while.
class Current {
public:
    explicit Current(const Card& card) : driver_(*card.driver) {
        driver_.check(driver_.push_context(card.context), "entering the device's context");
    }
    ~Current() {
        Context left = nullptr;
        driver_.pop_context(&left);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

private:
    const Driver& driver_;
};

/// An allocation, mapped. `bytes` is a multiple of the granularity.
class Mapped final : public LinkMemory {
public:
    Mapped(CardPtr card, Allocation allocation, std::uint64_t bytes)
        : card_(std::move(card)), allocation_(allocation) {
        const Driver& driver = *card_->driver;
        bytes_ = bytes;
        try {
            const Current current(*card_);
            Pointer at = 0;
            driver.check(driver.reserve(&at, bytes, 0, 0, 0), "reserving addresses");
            address_ = at;
            driver.check(driver.map(at, bytes, 0, allocation_, 0), "mapping device memory");
            mapped_ = true;
            const AccessDescription access{{kOnDevice, card_->device}, kReadWrite};
            driver.check(driver.set_access(at, bytes, &access, 1), "opening device memory");
        } catch (...) {
            drop();
            throw;
        }
    }
    ~Mapped() override { drop(); }

private:
    void drop() noexcept {
        const Driver& driver = *card_->driver;
        if (driver.push_context(card_->context) != kSuccess)
            return;
        if (mapped_)
            driver.unmap(address_, bytes_);
        if (address_ != 0)
            driver.free_reserved(address_, bytes_);
        driver.release(allocation_);
        Context left = nullptr;
        driver.pop_context(&left);
    }

    CardPtr card_;
    Allocation allocation_;
    bool mapped_ = false;
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
        const Driver& driver = *card_->driver;
        const std::uint64_t whole = round_up(std::max<std::uint64_t>(bytes, 1), card_->granularity);
        const AllocationProperties properties = card_->properties();
        Allocation allocation = 0;
        {
            const Current current(*card_);
            const Result result = driver.create(&allocation, whole, &properties, 0);
            if (result != kSuccess)
                throw Error(ErrorCode::OutOfMemory,
                            "libcuda.so.1 has no device memory of " + format_bytes(whole) +
                                " that other ranks copy from (" + std::to_string(result) +
                                "): make micro-batches smaller, or the model's share of a rank",
                            -1, result);
        }
        LinkAllocation made{std::make_shared<Mapped>(card_, allocation, whole), {}, {}};
        int file = -1;
        driver.check(driver.export_handle(&file, allocation, kFileDescriptor, 0),
                     "exporting device memory");
        made.file = FileDescriptor(file);
        return made;
    }

    std::shared_ptr<LinkMemory> open(FileDescriptor file, std::uint64_t bytes) override {
        const Driver& driver = *card_->driver;
        Allocation allocation = 0;
        {
            const Current current(*card_);
            // The interface passes the descriptor in the place of a pointer.
            driver.check(driver.import_handle(
                             &allocation,
                             reinterpret_cast<void*>(static_cast<std::intptr_t>(file.get())),
                             kFileDescriptor),
                         "opening a peer's memory");
        }
        return std::make_shared<Mapped>(card_, allocation, bytes);
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
    auto card = std::make_shared<Card>();
    card->driver = Driver::open(why_not);
    if (!card->driver)
        return nullptr;
    const Driver& driver = *card->driver;
    try {
        int count = 0;
        driver.check(driver.device_count(&count), "counting devices");
        for (int i = 0; i < count; ++i) {
            Ordinal device = -1;
            Uuid uuid{};
            driver.check(driver.device(&device, i), "finding a device");
            driver.check(driver.device_uuid(&uuid, device), "asking for a device's UUID");
            card->devices.emplace(hex(uuid), device);
        }
        const auto mine = card->devices.find(device_uuid);
        if (mine == card->devices.end()) {
            why_not = "libcuda.so.1 does not know the device with UUID " + device_uuid;
            return nullptr;
        }
        card->device = mine->second;
        driver.check(driver.retain_context(&card->context, card->device), "making a context");
        const AllocationProperties properties = card->properties();
        std::size_t granularity = 0;
        driver.check(driver.granularity(&granularity, &properties, kRecommendedGranularity),
                     "asking for the granularity of memory");
        card->granularity = granularity;
        auto made = std::make_unique<CudaLinkDriver>(card, device_uuid);
        try_out(*made);
        return made;
    } catch (const Error& error) {
        why_not = error.message();
        return nullptr;
    }
}

} // namespace bellows
