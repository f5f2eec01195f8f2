// SPDX-License-Identifier: MIT
#include "cuda_memory.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/memory_sizes.hpp>
#include <bellows/base/rounding.hpp>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace bellows::cuda {
namespace {

std::string hex(const Uuid& uuid) {
    constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (const unsigned char byte : uuid.bytes) {
        text += kDigits[byte >> 4];
        text += kDigits[byte & 15];
    }
    return text;
}

AllocationProperties properties_on(Ordinal device) {
    AllocationProperties made{};
    made.type = kPinned;
    made.handle_types = kFileDescriptor;
    made.location = {kOnDevice, device};
    return made;
}

} // namespace

std::shared_ptr<const Card> Card::open(const std::string& device_uuid, std::string& why_not) {
    auto card = std::make_shared<Card>();
    card->driver = Driver::open(why_not);
    if (!card->driver)
        return nullptr;
    const Driver& driver = *card->driver;
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
    const AllocationProperties properties = properties_on(card->device);
    std::size_t granularity = 0;
    driver.check(driver.granularity(&granularity, &properties, kRecommendedGranularity),
                 "asking for the granularity of memory");
    card->granularity = granularity;
    return card;
}

Card::~Card() {
    if (context != nullptr)
        driver->release_context(device);
}

Current::Current(const Card& card) : driver_(*card.driver) {
    driver_.check(driver_.push_context(card.context), "entering the device's context");
}

Current::~Current() {
    Context left = nullptr;
    driver_.pop_context(&left);
}

std::unique_ptr<Memory> Memory::allocate(CardPtr card, std::uint64_t bytes) {
    const std::uint64_t whole = round_up(std::max<std::uint64_t>(bytes, 1), card->granularity);
    const AllocationProperties properties = properties_on(card->device);
    Allocation allocation = 0;
    {
        const Current current(*card);
        const Result result = card->driver->create(&allocation, whole, &properties, 0);
        if (result != kSuccess)
            throw Error(ErrorCode::OutOfMemory,
                        "libcuda.so.1 has no device memory of " + format_bytes(whole) +
                            " that others open (" + std::to_string(result) +
                            "): make micro-batches smaller, or the model's share of a rank",
                        -1, result);
    }
    return std::unique_ptr<Memory>(new Memory(std::move(card), allocation, whole));
}

std::unique_ptr<Memory> Memory::open(CardPtr card, int file, std::uint64_t bytes) {
    Allocation allocation = 0;
    {
        const Current current(*card);
        // The interface passes the descriptor in the place of a pointer.
        card->driver->check(
            card->driver->import_handle(&allocation,
                                        reinterpret_cast<void*>(static_cast<std::intptr_t>(file)),
                                        kFileDescriptor),
            "opening a peer's memory");
    }
    return std::unique_ptr<Memory>(new Memory(std::move(card), allocation, bytes));
}

Memory::Memory(CardPtr card, Allocation allocation, std::uint64_t bytes)
    : card_(std::move(card)), allocation_(allocation), bytes_(bytes) {
    const Driver& driver = *card_->driver;
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

Memory::~Memory() {
    drop();
}

int Memory::export_file() const {
    int file = -1;
    const Current current(*card_);
    card_->driver->check(card_->driver->export_handle(&file, allocation_, kFileDescriptor, 0),
                         "exporting device memory");
    return file;
}

void Memory::drop() noexcept {
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

void copy_and_wait(const Card& card, Pointer to, Pointer from, std::uint64_t bytes,
                   std::int64_t timeout_ms) {
    if (bytes == 0)
        return;
    const Driver& driver = *card.driver;
    const Current current(card);
    Stream stream = nullptr;
    Event event = nullptr;
    driver.check(driver.create_stream(&stream, kNonBlocking), "making a stream");
    Result result = driver.create_event(&event, kNoTiming);
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    if (result == kSuccess)
        result = driver.copy(to, from, bytes, stream);
    if (result == kSuccess)
        result = driver.record_event(event, stream);
    while (result == kSuccess && (result = driver.query_event(event)) == kNotReady &&
           std::chrono::steady_clock::now() < end) {
        std::this_thread::yield();
        result = kSuccess;
    }
    if (event != nullptr && result != kNotReady)
        driver.destroy_event(event);
    if (result == kNotReady) // the stream is still at work and is left to the driver
        throw Error(ErrorCode::Timeout,
                    "a copy of " + format_bytes(bytes) + " in the device's memory does not end");
    driver.destroy_stream(stream);
    driver.check(result, "copying in the device's memory");
}

} // namespace bellows::cuda
