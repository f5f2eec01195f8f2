// SPDX-License-Identifier: MIT
#include <bellows/engine/dlpack.hpp>

#include "cuda_memory.hpp"

#include <bellows/base/error.hpp>

#include <dlpack/dlpack.h>

#include <array>
#include <limits>
#include <utility>
#include <vector>

#include <unistd.h>

namespace bellows {
namespace {

[[noreturn]] void refuse(const std::string& problem) {
    throw Error(ErrorCode::InvalidArgument, "the DLPack tensor " + problem);
}

DLDataType type_of(DType dtype) {
    const auto bits = static_cast<std::uint8_t>(8 * size_of(dtype));
    switch (dtype) {
    case DType::F32:
        return {kDLFloat, bits, 1};
    case DType::BF16:
        return {kDLBfloat, bits, 1};
    case DType::I32:
        return {kDLInt, bits, 1};
    case DType::U32:
    case DType::U8:
    case DType::F8E4M3:
    case DType::F8E5M2:
        return {kDLUInt, bits, 1};
    }
    throw Error(ErrorCode::Internal, "a dtype that DLPack does not know");
}

DType dtype_of(const DLDataType& type) {
    if (type.lanes == 1)
        for (const DType dtype : {DType::F32, DType::BF16, DType::I32, DType::U32, DType::U8}) {
            const DLDataType known = type_of(dtype);
            if (type.code == known.code && type.bits == known.bits)
                return dtype;
        }
    refuse("has elements of type code " + std::to_string(type.code) + ", " +
           std::to_string(type.bits) + " bits, " + std::to_string(type.lanes) +
           " lanes; take f32, bf16, i32, u32 or u8");
}

/// What a tensor of another library says of itself, checked.
struct Described {
    DType dtype{};
    std::vector<std::uint64_t> extents, strides; ///< in elements
    std::uint64_t bytes = 0;
    const std::byte* data = nullptr;
    bool contiguous = true;
};

Described describe(const DLTensor& tensor) {
    Described made;
    made.dtype = dtype_of(tensor.dtype);
    if (tensor.ndim < 1 || tensor.ndim > static_cast<int>(TensorView::kMaxRank))
        refuse("has " + std::to_string(tensor.ndim) + " dimensions; take 1 to 4");
    constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
    std::uint64_t elements = 1;
    made.strides.resize(static_cast<std::size_t>(tensor.ndim));
    for (int i = 0; i < tensor.ndim; ++i) {
        if (tensor.shape[i] < 0)
            refuse("has a negative extent");
        made.extents.push_back(static_cast<std::uint64_t>(tensor.shape[i]));
    }
    for (int i = tensor.ndim; i-- > 0;) {
        const std::uint64_t extent = made.extents[static_cast<std::size_t>(i)];
        const std::int64_t stride =
            tensor.strides != nullptr ? tensor.strides[i] : static_cast<std::int64_t>(elements);
        if (stride < 0)
            refuse("has a negative stride");
        made.strides[static_cast<std::size_t>(i)] = static_cast<std::uint64_t>(stride);
        if (extent > 1 && made.strides[static_cast<std::size_t>(i)] != elements)
            made.contiguous = false;
        if (extent != 0 && elements > kMost / size_of(made.dtype) / extent)
            refuse("is larger than 64 bits count");
        elements *= extent;
    }
    made.bytes = elements * size_of(made.dtype);
    if (made.bytes == 0)
        refuse("has no elements");
    if (tensor.data == nullptr)
        refuse("has no memory");
    made.data = static_cast<const std::byte*>(tensor.data) + tensor.byte_offset;
    return made;
}

/// The elements of a strided tensor of host memory in their order.
std::vector<std::byte> gathered(const Described& tensor) {
    const std::uint64_t size = size_of(tensor.dtype);
    std::vector<std::byte> bytes(tensor.bytes);
    std::vector<std::uint64_t> at(tensor.extents.size(), 0);
    for (std::uint64_t to = 0; to < tensor.bytes; to += size) {
        std::uint64_t from = 0;
        for (std::size_t i = 0; i < at.size(); ++i)
            from += at[i] * tensor.strides[i];
        std::copy_n(tensor.data + from * size, size, bytes.data() + to);
        for (std::size_t i = at.size(); i-- > 0;) {
            if (++at[i] < tensor.extents[i])
                break;
            at[i] = 0;
        }
    }
    return bytes;
}

/// The card of CUDA's driver that is this device. Throws Error{Unsupported}.
cuda::CardPtr card_of(const Device& device) {
    std::string why_not;
    cuda::CardPtr card = cuda::Card::open(device.info().uuid, why_not);
    if (!card)
        throw Error(ErrorCode::Unsupported,
                    device.info().name +
                        " shares no device memory with other libraries: " + why_not);
    return card;
}

/// A descriptor that is closed whatever happens.
struct OwnedFile {
    explicit OwnedFile(int opened) : file(opened) {}
    ~OwnedFile() { ::close(file); }
    OwnedFile(const OwnedFile&) = delete;
    OwnedFile& operator=(const OwnedFile&) = delete;
    int file;
};

Buffer import(Device& device, const cuda::Memory& memory, std::string name,
              MemoryCategory category) {
    const OwnedFile exported(memory.export_file());
    return Buffer::import_opaque(device, {exported.file, memory.bytes()}, std::move(name),
                                 category);
}

} // namespace

struct SharedBuffer::State {
    Place place{};
    cuda::CardPtr card;
    std::unique_ptr<cuda::Memory> memory; ///< outlives `buffer`, which is the same memory
    Buffer buffer;
};

std::string SharedBuffer::why_not_on_device(const Device& device) {
    if (!device.info().imports_opaque_memory)
        return device.info().name + " takes no memory of another API";
    try {
        (void)card_of(device);
    } catch (const Error& error) {
        return error.message();
    }
    return {};
}

SharedBuffer::SharedBuffer(Device& device, Place place, std::uint64_t bytes, std::string name,
                           MemoryCategory category)
    : state_(std::make_shared<State>()) {
    state_->place = place;
    if (place == Place::Host) {
        state_->buffer = Buffer(device, {.name = std::move(name),
                                         .bytes = bytes,
                                         .kind = MemoryKind::Readback,
                                         .category = category});
        return;
    }
    state_->card = card_of(device);
    state_->memory = cuda::Memory::allocate(state_->card, bytes);
    state_->buffer = import(device, *state_->memory, std::move(name), category);
}

Buffer& SharedBuffer::buffer() const noexcept {
    return state_->buffer;
}

SharedBuffer::Place SharedBuffer::place() const noexcept {
    return state_->place;
}

DLManagedTensor* SharedBuffer::hand_out(const TensorView& tensor) const {
    const BufferView whole = state_->buffer.view();
    if (tensor.buffer.resource != whole.resource)
        throw Error(ErrorCode::InvalidArgument,
                    "only a tensor in the shared buffer can be handed out");
    if (tensor.row_count)
        throw Error(ErrorCode::InvalidArgument,
                    "a tensor whose rows are counted on the device cannot be handed out");
    struct Manager {
        std::shared_ptr<State> state;
        std::array<std::int64_t, TensorView::kMaxRank> shape{}, strides{};
        DLManagedTensor managed{};
    };
    auto manager = std::make_unique<Manager>();
    manager->state = state_;
    for (std::uint32_t i = 0; i < tensor.rank; ++i) {
        manager->shape[i] = static_cast<std::int64_t>(tensor.extent[i]);
        manager->strides[i] = static_cast<std::int64_t>(tensor.stride[i]);
    }
    const bool host = state_->place == Place::Host;
    DLTensor& out = manager->managed.dl_tensor;
    out.data =
        host ? state_->buffer.mapped()
             : reinterpret_cast<void*>(static_cast<std::uintptr_t>(state_->memory->address()));
    out.device = host ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, state_->card->device};
    out.ndim = static_cast<int>(tensor.rank);
    out.dtype = type_of(tensor.dtype);
    out.shape = manager->shape.data();
    out.strides = manager->strides.data();
    out.byte_offset = tensor.buffer.offset - whole.offset;
    // Some readers expect the offset in the address alone.
    out.data = static_cast<std::byte*>(out.data) + std::exchange(out.byte_offset, 0);
    manager->managed.manager_ctx = manager.get();
    manager->managed.deleter = [](DLManagedTensor* gone) {
        delete static_cast<Manager*>(gone->manager_ctx);
    };
    return &manager.release()->managed;
}

struct TakenTensor::State {
    std::unique_ptr<cuda::Memory> memory; ///< outlives `buffer`, which may be the same memory
    Buffer buffer;
    TensorView view;
    bool copied = true;
    DLManagedTensor* lent = nullptr; ///< whose memory `buffer` is
};

TakenTensor::TakenTensor(Device& device, DLManagedTensor* tensor, std::string name)
    : state_(std::make_unique<State>()) {
    if (tensor == nullptr)
        throw Error(ErrorCode::InvalidArgument, "there is no DLPack tensor to take");
    const DLTensor& given = tensor->dl_tensor;
    const Described described = describe(given);
    State& state = *state_;
    if (given.device.device_type == kDLCPU) {
        const std::uint64_t unit = device.info().host_import_alignment;
        const bool in_place = described.contiguous && unit != 0 && described.bytes % unit == 0 &&
                              reinterpret_cast<std::uintptr_t>(described.data) % unit == 0;
        if (in_place) {
            state.buffer = Buffer::import_host(
                device, {const_cast<std::byte*>(described.data), described.bytes}, std::move(name),
                MemoryCategory::Scratch);
            state.copied = false;
        } else {
            state.buffer = Buffer(device, {.name = std::move(name), .bytes = described.bytes});
            if (described.contiguous)
                device.upload(state.buffer.view(),
                              std::span<const std::byte>(described.data, described.bytes));
            else
                device.upload(state.buffer.view(), gathered(described));
        }
    } else if (given.device.device_type == kDLCUDA) {
        if (!described.contiguous)
            refuse("in device memory has strides: make it contiguous first");
        const cuda::CardPtr card = card_of(device);
        if (given.device.device_id != card->device)
            throw Error(ErrorCode::Unsupported, "the DLPack tensor is on CUDA's device " +
                                                    std::to_string(given.device.device_id) + ", " +
                                                    device.info().name + " is its device " +
                                                    std::to_string(card->device));
        state.memory = cuda::Memory::allocate(card, described.bytes);
        cuda::copy_and_wait(
            *card, state.memory->address(),
            static_cast<cuda::Pointer>(reinterpret_cast<std::uintptr_t>(described.data)),
            described.bytes);
        state.buffer = import(device, *state.memory, std::move(name), MemoryCategory::Scratch);
    } else {
        throw Error(ErrorCode::Unsupported,
                    "the DLPack tensor is on a device of type " +
                        std::to_string(static_cast<int>(given.device.device_type)) +
                        "; take one of the CPU (1) or of CUDA (2)");
    }
    state.view = TensorView::contiguous(state.buffer.view(), described.dtype,
                                        std::span<const std::uint64_t>(described.extents));
    if (!state.copied)
        state.lent = tensor;
    else if (tensor->deleter != nullptr)
        tensor->deleter(tensor);
}

TakenTensor::TakenTensor(TakenTensor&&) noexcept = default;

TakenTensor& TakenTensor::operator=(TakenTensor&& other) noexcept {
    std::swap(state_, other.state_);
    return *this;
}

TakenTensor::~TakenTensor() {
    if (!state_)
        return;
    DLManagedTensor* const lent = std::exchange(state_->lent, nullptr);
    state_.reset(); // the buffer's memory is the lender's
    if (lent != nullptr && lent->deleter != nullptr)
        lent->deleter(lent);
}

const TensorView& TakenTensor::view() const noexcept {
    return state_->view;
}

bool TakenTensor::copied() const noexcept {
    return state_->copied;
}

} // namespace bellows
