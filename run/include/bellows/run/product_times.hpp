// SPDX-License-Identifier: MIT
#pragma once

// How fast a device computes FP8 products in each variant and tile that it has (fp8/choice.hpp),
// measured once and kept in the folder of the pipeline cache. The thread that records.

#include <bellows/engine/device.hpp>
#include <bellows/fp8/choice.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

struct ProductTimes {
    std::vector<fp8::Measurement> products;
    std::string measured;       ///< when: "2026-11-21 20:10:05 UTC"
    std::filesystem::path file; ///< where they are kept; "": nowhere
};

/// The file of devices of this name, with this driver and class of bf16 products, beside
/// DeviceOptions::pipeline_cache_file; "" without that.
std::filesystem::path product_times_file(const Device& device);

/// What is kept. Nothing when there is no such file, or it is damaged or was written by another
/// version or build of the kernels.
std::optional<ProductTimes> kept_product_times(Device& device);

/// Measures, and keeps it; that it cannot be kept is no error.
ProductTimes
measure_product_times(Device& device,
                      std::function<void(std::uint64_t done, std::uint64_t total)> on_progress);

/// The tiles that were fastest on this device; the usual ones where nothing is kept.
void take_kept_tiles(Device& device, fp8::Choice& choice);

/// For a report: each product with its variants, what runs take and what would be fastest; a JSON
/// object.
std::string to_json(const ProductTimes& times);

} // namespace bellows
