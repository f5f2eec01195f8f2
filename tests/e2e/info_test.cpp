// SPDX-License-Identifier: MIT
// `bellows info --kernels`: measured once, read again, measured when told to.
#include "e2e/runs.hpp"

#include <nlohmann/json.hpp>

#include <string>

using namespace bellows::e2e;
namespace fs = std::filesystem;

namespace {

class InfoKernels : public testing::Test {
protected:
    Finished info(const Flags& flags) const {
        Flags arguments = {"info", "--device", "cpu"};
        arguments.insert(arguments.end(), flags.begin(), flags.end());
        return workspace_.bellows(arguments, {{"XDG_CACHE_HOME", cache().string()}});
    }
    fs::path cache() const { return workspace_.path() / "cache"; }
    /// The file of times, which there must be once.
    fs::path kept() const {
        fs::path found;
        for (const auto& entry : fs::directory_iterator(cache() / "bellows"))
            if (entry.path().extension() == ".json") {
                EXPECT_EQ(found, "") << entry.path();
                found = entry.path();
            }
        return found;
    }

    Workspace workspace_;
};

} // namespace

TEST_F(InfoKernels, ShowsTheChoiceAndKeepsIt) {
    const Finished first = info({"--kernels"});
    ASSERT_EQ(first.exit_code, 0) << first.errors;
    EXPECT_LT(first.seconds, 90);
    for (const char* part : {"device 0: ", "bf16 products: ", "decoded", "packed", "streamed",
                             "8x256x256", "tn: transposed A times B", "*", " us ", "FLOPS", "B/s"})
        EXPECT_NE(first.out.find(part), std::string::npos) << part << " in " << first.out;
    EXPECT_NE(first.out.find(kept().string()), std::string::npos) << first.out;
    const std::string text = bellows::content_of(kept());

    const Finished second = info({"--kernels"});
    EXPECT_EQ(second.exit_code, 0) << second.errors;
    EXPECT_EQ(second.out, first.out) << "measured again";
    EXPECT_EQ(second.errors, "");

    const Finished json = info({"--kernels", "--json"});
    ASSERT_EQ(json.exit_code, 0) << json.errors;
    const auto products =
        nlohmann::json::parse(json.out).at("devices").at(0).at("fp8_products").at("products");
    ASSERT_GE(products.size(), 45u);
    const auto told = [&](std::size_t count) {
        const std::string all = std::to_string(count);
        return first.errors.find("measuring products " + all + "/" + all) != std::string::npos;
    };
    EXPECT_TRUE(told(products.size()) || told(2 * products.size())) // and tiles, but for CPUs
        << first.errors;
    for (const auto& product : products) {
        const auto& variants = product.at("variants");
        EXPECT_GT(variants.at("decoded").at("ns").get<double>(), 0) << product;
        EXPECT_TRUE(variants.contains(product.at("chosen").get<std::string>())) << product;
        for (const auto& [name, variant] : variants.items())
            EXPECT_NE(variant.at("class"), "") << product;
    }

    EXPECT_EQ(bellows::content_of(kept()), text);
    const Finished again = info({"--kernels", "--retune"});
    EXPECT_EQ(again.exit_code, 0) << again.errors;
    EXPECT_NE(bellows::content_of(kept()), text);

    // A damaged file is no error.
    workspace_.write(fs::relative(kept(), workspace_.path()).string(), "{\"format\": 1");
    const Finished after = info({"--kernels"});
    EXPECT_EQ(after.exit_code, 0) << after.errors;
    EXPECT_NE(after.errors.find("measuring"), std::string::npos);
    EXPECT_NO_THROW(nlohmann::json::parse(bellows::content_of(kept())));
}

TEST_F(InfoKernels, SaysWhatDoesNotGoTogether) {
    expect_one_line(info({"--retune"}), 2, "--kernels");
    const Finished help = workspace_.bellows({"info", "--help"});
    EXPECT_EQ(help.exit_code, 0);
    for (const char* part : {"--kernels", "--retune"})
        EXPECT_NE(help.out.find(part), std::string::npos) << help.out;
}

TEST_F(InfoKernels, ServesWithoutAFolder) {
    const Finished finished = workspace_.bellows({"info", "--device", "cpu", "--kernels"},
                                                 {{"XDG_CACHE_HOME", "/proc/nowhere"}});
    EXPECT_EQ(finished.exit_code, 0) << finished.errors;
    EXPECT_NE(finished.out.find("FP8 products"), std::string::npos) << finished.out;
}
