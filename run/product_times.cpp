// SPDX-License-Identifier: MIT
#include <bellows/run/product_times.hpp>

#include "base/records/checked_json.hpp"
#include "base/records/checksum.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/base/version.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/kernels/kernels.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <system_error>
#include <utility>

#include <unistd.h>

namespace bellows {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::uint64_t kFormat = 2; // with tiles
constexpr std::uint64_t kLargestFile = std::uint64_t{4} << 20;

/// Of what the shaders were compiled to.
std::string build_of_kernels() {
    std::uint32_t sum = 0;
    const auto add = [&](std::string_view text) { sum = crc32_of(text.data(), text.size(), sum); };
    for (const KernelInfo* kernel : kernels::all()) {
        add(kernel->name);
        for (const KernelVariant& variant : kernel->variants) {
            add(variant.name);
            sum = crc32_of(variant.spirv.data(), variant.spirv.size_bytes(), sum);
        }
    }
    return hex32(sum);
}

/// What times depend on, as the file says it: devices of one name share them.
Json key_of(const Device& device) {
    const DeviceInfo& info = device.info();
    return {{"format", kFormat},
            {"bellows", kVersion},
            {"kernels", build_of_kernels()},
            {"device", {{"name", info.name}, {"driver", info.driver}}},
            {"bf16_products", gemm_class(device).name}};
}

std::string now() {
    const std::time_t seconds = std::time(nullptr);
    std::tm parts{};
    ::gmtime_r(&seconds, &parts);
    char text[32];
    std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts);
    return text;
}

std::uint64_t nanoseconds(double seconds) {
    return static_cast<std::uint64_t>(std::llround(seconds * 1e9));
}

/// Every time in it.
template <class Function>
void for_each_time(std::vector<fp8::Measurement>& products, Function function) {
    for (fp8::Measurement& m : products)
        for (fp8::VariantTime& v : m.variants) {
            function(v.seconds);
            for (fp8::TileTimes& times : v.tiles)
                for (fp8::TileTime& t : times.tiles)
                    function(t.seconds);
        }
}

/// From what nanoseconds() gave; false where that is no time.
bool take_seconds(double& seconds, const Json& ns) {
    if (!ns.is_number_unsigned() || ns == 0)
        return false;
    seconds = static_cast<double>(ns.get<std::uint64_t>()) * 1e-9;
    return true;
}

Json json_of(const fp8::TileTimes& times) {
    Json ns = Json::object();
    for (const fp8::TileTime& t : times.tiles)
        if (t.seconds > 0)
            ns[t.name] = nanoseconds(t.seconds);
    return {{"rows", times.rows}, {"usual", times.tiles.front().name}, {"ns", ns}};
}

Json json_of(const fp8::Measurement& m) {
    Json variants = Json::object();
    for (const fp8::VariantTime& v : m.variants) {
        Json& entry = variants[fp8::to_string(v.variant)];
        entry["class"] = v.numeric_class;
        if (!v.why_not.empty())
            entry["why_not"] = v.why_not;
        else if (v.seconds > 0)
            entry["ns"] = nanoseconds(v.seconds);
        for (const fp8::TileTimes& times : v.tiles)
            entry["tiles"].push_back(json_of(times));
    }
    return {{"kind", fp8::to_string(m.kind)},
            {"groups", m.groups},
            {"rows", m.rows},
            {"n", m.n},
            {"k", m.k},
            {"usual", fp8::to_string(m.usual)},
            {"variants", variants}};
}

/// A name that is none of this version's says nothing. False where another tile was the usual one.
bool take_times(fp8::TileTimes& times, const Json& json) {
    if (json.at("rows") != times.rows || json.at("usual") != times.tiles.front().name)
        return false;
    const Json& ns = json.at("ns");
    return std::all_of(times.tiles.begin(), times.tiles.end(), [&](fp8::TileTime& t) {
        return !ns.contains(t.name) || take_seconds(t.seconds, ns.at(t.name));
    });
}

bool take_times(fp8::VariantTime& v, const Json& entry) {
    const Json tiles = entry.value("tiles", Json::array());
    if (entry.contains("why_not") == v.why_not.empty() || tiles.size() != v.tiles.size() ||
        (entry.contains("ns") && !take_seconds(v.seconds, entry.at("ns"))))
        return false;
    for (std::size_t i = 0; i < tiles.size(); ++i)
        if (!take_times(v.tiles[i], tiles.at(i)))
            return false;
    return true;
}

/// Takes the times of a product from what json_of() wrote; false where that is another product.
bool take_times(fp8::Measurement& m, const Json& json) {
    if (json.at("kind") != fp8::to_string(m.kind) || json.at("groups") != m.groups ||
        json.at("rows") != m.rows || json.at("n") != m.n || json.at("k") != m.k ||
        json.at("variants").size() != m.variants.size())
        return false;
    return std::all_of(m.variants.begin(), m.variants.end(), [&](fp8::VariantTime& v) {
        return take_times(v, json.at("variants").at(fp8::to_string(v.variant)));
    });
}

std::optional<ProductTimes> parse_times(Device& device, const Json& json) {
    require_checksum(json);
    const Json key = key_of(device);
    for (const auto& [name, value] : key.items())
        if (json.at(name) != value)
            return std::nullopt;
    ProductTimes times;
    times.measured = json.at("measured").get<std::string>();
    times.products = fp8::measure(device, {.timed = fp8::Timed::None});
    const Json& products = json.at("products");
    if (products.size() != times.products.size())
        return std::nullopt;
    for (std::size_t i = 0; i < products.size(); ++i)
        if (!take_times(times.products[i], products.at(i)))
            return std::nullopt;
    return times;
}

/// Written aside and renamed, as several processes may share the file.
void keep(const Device& device, const ProductTimes& times) {
    Json json = key_of(device);
    json["measured"] = times.measured;
    json["products"] = Json::array();
    for (const fp8::Measurement& m : times.products)
        json["products"].push_back(json_of(m));
    std::error_code ignored;
    fs::create_directories(times.file.parent_path(), ignored);
    const fs::path temporary = times.file.string() + "." + std::to_string(::getpid()) + ".new";
    try {
        write_file_durably(temporary, format_checked(std::move(json)));
        fs::rename(temporary, times.file);
    } catch (const std::exception&) { // times that cannot be kept are measured again
        fs::remove(temporary, ignored);
    }
}

} // namespace

fs::path product_times_file(const Device& device) {
    const fs::path cache = device.options().pipeline_cache_file;
    if (cache.empty())
        return {};
    const DeviceInfo& info = device.info();
    const std::string key = info.name + info.driver + gemm_class(device).name;
    return cache.parent_path() /
           ("fp8-products." + hex32(crc32_of(key.data(), key.size())) + ".json");
}

std::optional<ProductTimes> kept_product_times(Device& device) {
    const fs::path file = product_times_file(device);
    if (file.empty())
        return std::nullopt;
    try {
        auto times = parse_times(device, parse_shallow(read_file(file, kLargestFile)));
        if (times)
            times->file = file;
        return times;
    } catch (const Json::exception&) {
        return std::nullopt;
    } catch (const Error& error) {
        if (error.code() != ErrorCode::Io && error.code() != ErrorCode::Corrupt)
            throw;
        return std::nullopt;
    }
}

ProductTimes
measure_product_times(Device& device,
                      std::function<void(std::uint64_t done, std::uint64_t total)> on_progress) {
    ProductTimes times;
    const auto timed = device.info().is_cpu ? fp8::Timed::Usual : fp8::Timed::Tiles;
    times.products = fp8::measure(device, {.timed = timed, .on_progress = std::move(on_progress)});
    for_each_time(times.products, [](double& seconds) { // as they will be read
        seconds = static_cast<double>(nanoseconds(seconds)) * 1e-9;
    });
    times.measured = now();
    times.file = product_times_file(device);
    device.save_pipeline_cache();
    if (!times.file.empty())
        keep(device, times);
    return times;
}

void take_kept_tiles(Device& device, fp8::Choice& choice) {
    if (const auto kept = kept_product_times(device))
        choice.take_tiles(kept->products);
}

std::string to_json(const ProductTimes& times) {
    Json json{
        {"measured", times.measured}, {"file", times.file.string()}, {"products", Json::array()}};
    for (const fp8::Measurement& m : times.products) {
        Json entry = json_of(m);
        entry["chosen"] = fp8::to_string(fp8::fastest(m, fp8::Bits::Usual));
        entry["fastest"] = fp8::to_string(fp8::fastest(m, fp8::Bits::Any));
        for (const fp8::VariantTime& v : m.variants)
            for (std::size_t i = 0; i < v.tiles.size(); ++i) {
                const fp8::TileTime* faster = v.tiles[i].faster();
                entry["variants"][fp8::to_string(v.variant)]["tiles"][i]["fastest"] =
                    (faster != nullptr ? *faster : v.tiles[i].tiles.front()).name;
            }
        json["products"].push_back(std::move(entry));
    }
    return json.dump();
}

} // namespace bellows
