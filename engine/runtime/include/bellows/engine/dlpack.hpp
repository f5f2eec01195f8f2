// SPDX-License-Identifier: MIT
#pragma once

// Tensors shared with other libraries (PyTorch, NumPy, JAX, ...) as DLManagedTensor of DLPack,
// whose <dlpack/dlpack.h> a caller includes to look into one. Host memory is kDLCPU; device memory
// is kDLCUDA where CUDA's driver serves the device, else it is not shared. DLPack has no FP8 types
// in this form, so FP8 codes go as u8. One thread at a time for each object.

#include <bellows/engine/device.hpp>
#include <bellows/engine/memory.hpp>

#include <cstdint>
#include <memory>
#include <string>

extern "C" struct DLManagedTensor;

namespace bellows {

/// Memory of the device that other libraries can use, too.
class SharedBuffer {
public:
    enum class Place : std::uint8_t {
        Host,  ///< mapped memory of the host: kDLCPU
        Device ///< kDLCUDA; the allocation comes from CUDA's driver and is imported into Vulkan
    };

    /// Why there is no Place::Device on this device; "" where there is.
    static std::string why_not_on_device(const Device& device);

    /// Throws Error{Unsupported} with that reason, Error{OutOfMemory}.
    SharedBuffer(Device& device, Place place, std::uint64_t bytes, std::string name,
                 MemoryCategory category = MemoryCategory::Scratch);

    Buffer& buffer() const noexcept;
    Place place() const noexcept;

    /// The tensor, which lies in buffer(), for another library. The memory lives until this object
    /// and all that were handed out are gone; the device must outlive them. The caller has waited
    /// for work that writes the tensor, and waits for the other library before it uses it again.
    /// Whoever gets it calls its deleter. Throws Error{InvalidArgument} for a tensor elsewhere, or
    /// one whose rows are counted on the device.
    DLManagedTensor* hand_out(const TensorView& tensor) const;

private:
    struct State;
    std::shared_ptr<State> state_;
};

/// A tensor of another library for work on the device.
class TakenTensor {
public:
    /// Takes the tensor over and calls its deleter when this object is gone, or at once where it
    /// had to copy; the caller has waited for work that uses the tensor then. Memory of the host is
    /// used where it stands if the device imports it (its address and size are multiples of
    /// DeviceInfo::host_import_alignment and its rows follow one another); else it is copied to the
    /// device, as memory of CUDA is, always. The other library has finished its work on the tensor.
    /// If this throws, the tensor is still the caller's: Error{InvalidArgument} for a rank, a type,
    /// strides or a size that a TensorView does not have, Error{Unsupported} for other kinds of
    /// devices and for another device's memory.
    TakenTensor(Device& device, DLManagedTensor* tensor, std::string name);
    ~TakenTensor();
    TakenTensor(TakenTensor&&) noexcept;
    TakenTensor& operator=(TakenTensor&&) noexcept;

    /// Contiguous. Types: f32, bf16, i32, u32, u8.
    const TensorView& view() const noexcept;
    /// What the device writes to it the other library does not see.
    bool copied() const noexcept;

private:
    struct State;
    std::unique_ptr<State> state_;
};

} // namespace bellows
