// SPDX-License-Identifier: MIT
#pragma once

// The kernels that decide the bits of a run: what its checkpoint says, what the environment wants,
// or what rank 0 has measured, and how its ranks agree on them.

#include <bellows/comm/host_collectives.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/fp8/choice.hpp>
#include <bellows/shape/layout.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

namespace bellows {

/// Choices by name, as a checkpoint keeps them.
using KernelNames = std::map<std::string, std::string>;

/// By the name of their choice:
///   gemm   numeric class of products of bf16 tensors (engine's gemm_plan.hpp)
///   fp8    variants of FP8 products (fp8's choice.hpp), where linear layers compute in FP8
///   bf16   variants of their products of two bf16 tensors, where they compute in bf16; a variant's
///          name alone stands for all of these, "decoded" for the engine's products
struct KernelChoice {
    KernelNames chosen;
    /// Of a run that goes on, or asked for: no rank may choose otherwise.
    bool binding = false;
};

struct AgreedKernels {
    std::optional<fp8::Choice> products; ///< of linear layers in FP8 or bf16
    std::string why_decoded;             ///< all of these; empty where they are not
};

/// In the environment, for FP8 products and those of bf16 linear layers:
///   usual      (default) what suits the device; of FP8 the fastest variant of that numeric class;
///              what a run had that goes on
///   measured   the fastest variant, whatever its bits
///   or a choice as fp8::describe() writes it, e.g. "decoded" (of bf16 the engine's products), or
///   of bf16 "direct"
inline constexpr const char* kFp8VariantsVariable = "BELLOWS_FP8_VARIANTS";
inline constexpr const char* kBf16VariantsVariable = "BELLOWS_BF16_VARIANTS";

/// The name of the choice that says how linear layers compute: "fp8", "bf16", "" for f32.
const char* products_key(Precision precision);
/// The variable of that key.
const char* variants_variable(const std::string& key);
/// What the device takes by itself of that key.
std::string usual_products(Device& device, const std::string& key);
/// The table of that text. Throws as fp8::parse_choice does, also where the device lacks a variant
/// whose name alone stands for bf16 products.
fp8::Choice parse_products(Device& device, const std::string& key, const std::string& text);

/// Collective: rank 0's choice (it `leads`) serves all, as ranks that round differently would drift
/// apart. Of bf16 runs, before anything is recorded on the device, whose class of products it sets.
/// Throws Error{Unsupported} when a rank's device lacks the class, or variants of products that are
/// binding; where one lacks others, all decode (fp8::Variant::Decoded; bf16 products are the
/// engine's then).
AgreedKernels agree_on_kernels(Device& device, HostCollectives& everyone, bool leads,
                               Precision precision, const KernelChoice& wanted);

/// For a Trainer with this device; `kept`: of the checkpoint from which the run goes on, or null.
/// Rank 0 may have to measure first, on a device of its own; CPUs are not measured for a run.
/// on_progress: of that.
KernelChoice
choose_kernels(const Device& device, Precision precision, const KernelNames* kept, bool leads,
               std::function<void(std::uint64_t done, std::uint64_t total)> on_progress);

/// What a checkpoint keeps of how its run computed products, so that they keep their bits, unless
/// the options name another class of bf16 products.
KernelChoice kept_kernels(const KernelNames& kept, const DeviceOptions& options);

/// The variants that the environment names, and nothing else.
KernelChoice named_kernels(Precision precision);

/// Whether the run is to have copies of weights for its products, transposed or packed, as far as
/// this device can tell before the ranks agree.
bool wants_copies_of_weights(Device& device, Precision precision, const KernelNames* kept);

/// What the checkpoint of a run in this precision says about the products of linear layers, unless
/// the environment wants otherwise, for a device that reads its weights; Decoded where it cannot
/// compute that.
fp8::Choice products_of(const KernelNames& kept, Precision precision, Device& device);

} // namespace bellows
