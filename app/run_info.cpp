// SPDX-License-Identifier: MIT
// The body of `bellows info`: devices, features, limits, and which variant of each kernel runs.
#include "app/run.hpp"

#include "app/mpi_info.hpp"
#include "app/product_table.hpp"
#include "app/progress.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/version.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/engine/device_choice.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/kernels/kernels.hpp>
#include <bellows/run/product_times.hpp>
#include <bellows/train/train_config.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

namespace bellows {

namespace {

using Json = nlohmann::json;

bool is_selected(const DeviceInfo& info, const std::string& devices) {
    const std::vector<std::string> names = parse_devices(devices);
    return std::any_of(names.begin(), names.end(), [&](std::string name) {
        std::erase(name, '-');
        return name == kAnyDevice || name == (info.is_cpu ? "cpu" : "gpu") ||
               name == std::to_string(info.index) || name == info.uuid;
    });
}

Json json_of(const DeviceInfo& info) {
    return {{"index", info.index},
            {"name", info.name},
            {"driver", info.driver},
            {"uuid", info.uuid},
            {"vulkan", info.api_version},
            {"cpu", info.is_cpu},
            {"memory_bytes", info.memory_bytes},
            {"subgroup_size", info.subgroup_size},
            {"shared_memory_bytes", info.shared_memory_bytes},
            {"max_workgroup_invocations", info.max_workgroup_invocations},
            {"max_workgroup_subgroups", info.max_workgroup_subgroups},
            {"host_import_alignment", info.host_import_alignment},
            {"features", info.features},
            {"cooperative_matrices", info.cooperative_matrices},
            {"lacks", info.unmet_requirements}};
}

/// Whether the device has been created with a queue that draws, and what that means.
std::string graphics_queue_of(const Device& device) {
    return device.has_feature("no_graphics_queue")
               ? "none: on NVIDIA kernels have all shared memory of a processor"
               : "one: on NVIDIA 48 KiB of shared memory are left to a processor";
}

/// Kernel variants that this device and build run, and why not the others.
Json kernels_of(const Device& device) {
    Json all = Json::object();
    for (const KernelInfo* kernel : kernels::all()) {
        Json variants = Json::object();
        for (std::uint32_t i = 0; i < kernel->variants.size(); ++i) {
            const std::string reason = device.why_not(*kernel, i);
            variants[std::string(kernel->variants[i].name)] =
                reason.empty() ? Json("runs") : Json(reason);
        }
        all[std::string(kernel->name)] = variants;
    }
    return all;
}

/// Numeric classes of products of bf16 tensors, the one that the device takes by itself first.
Json gemm_classes_of(const Device& device) {
    Json all = Json::array();
    for (const GemmClass& gemm : gemm_classes(device))
        all.push_back({{"name", gemm.name},
                       {"state", gemm.name == gemm_class(device).name ? "chosen"
                                 : gemm.why_not.empty()               ? "runs when named"
                                                                      : gemm.why_not}});
    return all;
}

void print_text(const Json& report) {
    std::printf("bellows %s\n", report["bellows"].get<std::string>().c_str());
    std::printf("MPI: %s\n", report["mpi"]["library"].get<std::string>().c_str());
    std::printf("  %-26s %s\n", "standard", report["mpi"]["standard"].get<std::string>().c_str());
    std::printf("  %-26s %s\n", "thread level",
                report["mpi"]["thread_level"].get<std::string>().c_str());
    for (const Json& device : report["devices"]) {
        std::printf("device %s: %s\n", device["index"].dump().c_str(),
                    device["name"].get<std::string>().c_str());
        for (const auto& [key, value] : device.items()) {
            if (key == "index" || key == "name" || key == "kernels" || key == "bf16_products")
                continue;
            const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
            if (text != "[]")
                std::printf("  %-26s %s\n", key.c_str(), text.c_str());
        }
        if (!device.contains("kernels"))
            continue;
        for (const Json& gemm : device["bf16_products"])
            std::printf("  %-26s %s: %s\n", "bf16 products",
                        gemm["name"].get<std::string>().c_str(),
                        gemm["state"].get<std::string>().c_str());
        std::uint64_t running = 0, others = 0;
        for (const auto& [kernel, variants] : device["kernels"].items()) {
            std::map<std::string, std::string> by_reason;
            for (const auto& [variant, state] : variants.items()) {
                if (state == "runs") {
                    ++running;
                    continue;
                }
                ++others;
                std::string& names = by_reason[state.get<std::string>()];
                names += (names.empty() ? "" : ", ") + variant;
            }
            for (const auto& [reason, names] : by_reason)
                std::printf("  %s does not run as %s: %s\n", kernel.c_str(), names.c_str(),
                            reason.c_str());
        }
        std::printf("  %-26s %llu run, %llu do not\n", "kernel variants",
                    static_cast<unsigned long long>(running),
                    static_cast<unsigned long long>(others));
    }
}

/// Kept ones, or else measured now.
ProductTimes product_times(Device& device, bool again) {
    if (!again)
        if (auto times = kept_product_times(device))
            return std::move(*times);
    ProgressReporter progress(stderr, 0, ProgressReporter::detect(stderr));
    return measure_product_times(device, [&](std::uint64_t done, std::uint64_t total) {
        progress.phase("measuring products", done, total);
    });
}

void print_product_times(const Device& device, const ProductTimes& times) {
    std::printf("device %u: %s\n", device.info().index, device.info().name.c_str());
    for (const Json& gemm : gemm_classes_of(device))
        std::printf("bf16 products: %s: %s\n", gemm["name"].get<std::string>().c_str(),
                    gemm["state"].get<std::string>().c_str());
    std::printf("%s\n", format_product_times(times).c_str());
}

} // namespace

int run_info(const InfoOptions& options) {
    const MpiInfo mpi = mpi_info(); // before Vulkan has threads
    Json report{{"bellows", kVersion},
                {"mpi",
                 {{"library", mpi.library},
                  {"standard", mpi.standard},
                  {"thread_level", mpi.thread_level}}},
                {"devices", Json::array()}};
    bool serves = false;
    for (const DeviceInfo& info : list_devices()) {
        if (!options.device.empty() && !is_selected(info, options.device))
            continue;
        Json entry = json_of(info);
        if (info.unmet_requirements.empty()) {
            serves = true;
            DeviceOptions device_options = device_options_of_rank(kAnyDevice, 0);
            device_options.select = std::to_string(info.index);
            const auto device = Device::create(device_options);
            entry["queues"] = device->describe_queues();
            entry["graphics_queue"] = graphics_queue_of(*device);
            entry["kernels"] = kernels_of(*device);
            entry["bf16_products"] = gemm_classes_of(*device);
            if (options.kernels) {
                const ProductTimes times = product_times(*device, options.retune);
                entry["fp8_products"] = Json::parse(to_json(times));
                if (!options.json)
                    print_product_times(*device, times);
            }
        }
        report["devices"].push_back(entry);
    }
    if (options.json)
        std::printf("%s\n", report.dump(2).c_str());
    else if (!options.kernels)
        print_text(report);
    if (!serves)
        throw Error(ErrorCode::Unsupported,
                    options.device.empty()
                        ? std::string("no Vulkan device serves; ") +
                              (report["devices"].empty()
                                   ? "mesa-vulkan-drivers has one for the CPU"
                                   : "the list on standard output says what each lacks")
                        : "no Vulkan device serves as \"" + options.device +
                              "\"; devices here: " + device_names());
    return 0;
}

} // namespace bellows
