// SPDX-License-Identifier: MIT
// Times of FP8 products are kept in a file and read again; what is damaged or another's is not.
#include "app/product_table.hpp"
#include "base/records/checked_json.hpp"
#include "support/small_run.hpp"
#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"

#include <bellows/base/files.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/run/kernels.hpp>
#include <bellows/run/product_times.hpp>
#include <bellows/train/checkpoints.hpp>
#include <bellows/train/trainer.hpp>

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace bellows {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

class ProductTimesTest : public ::testing::Test {
protected:
    void SetUp() override {
        DeviceOptions options;
        options.pipeline_cache_file = folder_.path() / "cache" / "pipelines.bin";
        device_ = testing::make_device(options);
        file_ = product_times_file(*device_);
    }

    /// Training, and a program that reads what was trained; the choice is "packed", and tiles.
    void expect_runs_take(const fp8::Choice& packed) {
        SavedRun options;
        options.config = small_run();
        options.config.train.precision = Precision::FP8;
        options.out = folder_.path();
        World world = World::single();
        Trainer trainer(*device_, world, options.config, {}, {{{"fp8", "packed"}}, true});
        EXPECT_EQ(trainer.parameters().products(), packed);
        EXPECT_EQ(trainer.chosen_kernels().at("fp8"), "packed") << "a tile decides no bits";
        const auto saved =
            save_checkpoint(options.out, {{kConfigFile, options.config_text()}}, trainer, world, 1);
        device_->wait_idle();
        EXPECT_EQ(products_of(Checkpoint::open(saved).state().kernels,
                              options.config.train.precision, *device_),
                  packed);
    }

    TemporaryFolder folder_;
    std::unique_ptr<Device> device_;
    fs::path file_;
};

TEST_F(ProductTimesTest, AreKeptAndReadAgain) {
    EXPECT_EQ(file_.parent_path(), folder_.path() / "cache");
    EXPECT_FALSE(kept_product_times(*device_));
    std::uint64_t told = 0;
    const ProductTimes measured =
        measure_product_times(*device_, [&](std::uint64_t, std::uint64_t) { ++told; });
    EXPECT_EQ(told, fp8::product_kinds().size());
    EXPECT_EQ(measured.file, file_);
    const auto kept = kept_product_times(*device_);
    ASSERT_TRUE(kept);
    EXPECT_EQ(kept->measured, measured.measured);
    EXPECT_EQ(kept->file, file_);
    EXPECT_EQ(to_json(*kept), to_json(measured));
    EXPECT_EQ(format_product_times(*kept), format_product_times(measured));
    for (const auto& entry : fs::directory_iterator(file_.parent_path()))
        EXPECT_NE(entry.path().extension(), ".new") << entry.path();

    // Damaged: every byte in turn would be slow; some places, and cut short.
    const std::string whole = read_file(file_, 1 << 20);
    const auto kept_from = [&](const std::string& text) {
        write_file_durably(file_, text);
        return kept_product_times(*device_).has_value();
    };
    ASSERT_TRUE(kept_from(whole));
    for (std::size_t at = 0; at + 1 < whole.size(); at += 97) {
        std::string damaged = whole;
        damaged[at] = static_cast<char>(damaged[at] ^ 1);
        EXPECT_FALSE(kept_from(damaged)) << "byte " << at;
        EXPECT_FALSE(kept_from(whole.substr(0, at))) << "cut to " << at;
    }
    EXPECT_FALSE(kept_from(std::string(100000, '[')));

    // Whole, but of another device, driver, version, build of kernels, numeric class or product.
    const auto kept_with = [&](const std::function<void(Json&)>& change) {
        Json json = Json::parse(whole);
        change(json);
        return kept_from(format_checked(json));
    };
    EXPECT_TRUE(kept_with([](Json&) {}));
    const std::pair<const char*, std::function<void(Json&)>> others[] = {
        {"format", [](Json& j) { j["format"] = 1; }},
        {"version", [](Json& j) { j["bellows"] = "0.0.1"; }},
        {"kernels", [](Json& j) { j["kernels"] = "00000000"; }},
        {"class", [](Json& j) { j["bf16_products"] = "coopmat-bf16-k16"; }},
        {"driver", [](Json& j) { j["device"]["driver"] = "another 1.0"; }},
        {"name", [](Json& j) { j["device"]["name"] = "another"; }},
        {"fewer products", [](Json& j) { j["products"].erase(0); }},
        {"another kind", [](Json& j) { j["products"][0]["kind"] = "nt"; }},
        {"other sizes", [](Json& j) { j["products"][0]["rows"] = 9; }},
        {"no variants", [](Json& j) { j["products"][0]["variants"] = Json::object(); }},
        {"no time", [](Json& j) { j["products"][0]["variants"]["decoded"]["ns"] = -1; }},
        {"zero", [](Json& j) { j["products"][0]["variants"]["decoded"]["ns"] = 0; }},
        {"words", [](Json& j) { j["products"][0]["variants"]["decoded"]["ns"] = "fast"; }},
        {"a reason",
         [](Json& j) { j["products"][0]["variants"]["decoded"]["why_not"] = "it is Monday"; }},
        {"a tile",
         [](Json& j) { j["products"][0]["variants"]["decoded"]["tiles"].push_back(Json()); }},
        {"no date", [](Json& j) { j.erase("measured"); }},
    };
    for (const auto& [what, change] : others)
        EXPECT_FALSE(kept_with(change)) << what;
}

// Tiles are not timed on CPUs: the file gets times that nobody took.
TEST_F(ProductTimesTest, TilesAreReadAgain) {
    const ProductTimes measured = measure_product_times(*device_, {});
    Json json = Json::parse(read_file(file_, 1 << 20));
    Json* some = nullptr;
    for (Json& product : json["products"])
        for (Json& variant : product["variants"])
            if (variant.contains("tiles"))
                for (Json& times : variant["tiles"]) {
                    EXPECT_EQ(times["ns"], Json::object()) << "a CPU's tiles were timed";
                    some = &times;
                }
    EXPECT_EQ(some != nullptr, fp8::why_not(*device_, fp8::Variant::Packed).empty());
    if (some == nullptr)
        return;
    for (std::size_t i = 0; i < measured.products.size(); ++i)
        for (const fp8::VariantTime& v : measured.products[i].variants)
            for (std::size_t t = 0; t < v.tiles.size(); ++t) {
                Json& ns =
                    json["products"][i]["variants"][fp8::to_string(v.variant)]["tiles"][t]["ns"];
                ns["of a later version"] = 1;
                for (const fp8::TileTime& tile : v.tiles[t].tiles)
                    ns[tile.name] = &tile == &v.tiles[t].tiles.back() ? 1000 : 2000;
            }
    write_file_durably(file_, format_checked(json));
    const auto kept = kept_product_times(*device_);
    ASSERT_TRUE(kept) << "an unknown tile is no error";
    for (const fp8::Measurement& m : kept->products)
        for (const fp8::VariantTime& v : m.variants)
            for (const fp8::TileTimes& times : v.tiles)
                EXPECT_EQ(times.faster(), times.tiles.size() > 1 ? &times.tiles.back() : nullptr)
                    << to_string(m.kind);
    const fp8::Choice usual(fp8::Variant::Packed);
    fp8::Choice expected = usual, taken = usual;
    expected.take_tiles(kept->products);
    take_kept_tiles(*device_, taken);
    EXPECT_EQ(taken, expected);
    EXPECT_NE(taken, usual);
    expect_runs_take(expected);

    const auto kept_with = [&](const char* what, const Json& value) {
        const Json before = *some;
        (*some)[what] = value;
        write_file_durably(file_, format_checked(json));
        *some = before;
        return kept_product_times(*device_).has_value();
    };
    const std::string name = (*some)["usual"].get<std::string>();
    EXPECT_TRUE(kept_with("ns", {{name, 7}}));
    for (const Json& wrong : {Json(0), Json(-1), Json("fast")})
        EXPECT_FALSE(kept_with("ns", {{name, wrong}})) << wrong;
    EXPECT_FALSE(kept_with("usual", "1x1")) << "another tile was the usual one";
    EXPECT_FALSE(kept_with("rows", 3));
    fs::remove(file_);
    take_kept_tiles(*device_, taken);
    EXPECT_EQ(taken, expected) << "nothing is kept";
}

TEST_F(ProductTimesTest, AClassOfBf16ProductsHasItsOwnFile) {
    for (const GemmClass& c : gemm_classes(*device_)) {
        if (!c.why_not.empty() || c.name == gemm_class(*device_).name)
            continue;
        use_gemm_class(*device_, c.name);
        EXPECT_NE(product_times_file(*device_), file_) << c.name;
        use_gemm_class(*device_, "");
    }
    EXPECT_EQ(product_times_file(*device_), file_);
    EXPECT_EQ(product_times_file(*testing::make_device()), "") << "there is no folder";
}

TEST_F(ProductTimesTest, TheTableFitsATerminal) {
    ProductTimes times;
    times.measured = "2026-11-21 20:10:05 UTC";
    times.products = fp8::measure(*device_, {.timed = fp8::Timed::None});
    fp8::Measurement& m = times.products.front();
    m.usual = fp8::Variant::Decoded;
    m.variants = {{fp8::Variant::Decoded, "f32-sequential", "", 99999.94e-6},
                  {fp8::Variant::Packed, "packed-f16-k16", "", 1e-6},
                  {fp8::Variant::Packed, "f32-sequential", "it is Monday", 0}};
    m.variants[1].tiles = {{96,
                            {{{.fragments_m = 1}, "128x128", 3e-6},
                             {{.fragments_m = 2}, "64x128 in 2, 4 ahead", 1e-6}}}};
    const std::string text = format_product_times(times);
    EXPECT_NE(text.find("*99999.9 us"), std::string::npos) << text;
    EXPECT_NE(text.find("+    1.0 us"), std::string::npos) << text;
    EXPECT_NE(text.find("   packed 64x128 in 2, 4 ahead\n"), std::string::npos) << text;
    EXPECT_EQ(text.find("packed 128x128"), std::string::npos) << text;
    EXPECT_NE(text.find("(a) it is Monday"), std::string::npos) << text;
    EXPECT_NE(text.find("not timed"), std::string::npos) << text;
    for (std::size_t at = 0, end = 0; at < text.size(); at = end + 1) {
        end = std::min(text.find('\n', at), text.size());
        EXPECT_LE(end - at, 100u) << text.substr(at, end - at);
        EXPECT_TRUE(end == at || text[end - 1] != ' ') << text.substr(at, end - at);
    }
}

} // namespace
} // namespace bellows
