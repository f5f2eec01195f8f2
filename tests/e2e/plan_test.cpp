// SPDX-License-Identifier: MIT
// `bellows plan experts` as a user starts it: the answers of EPLB's README, a table, hostile files.
#include "e2e/runs.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <string>
#include <vector>

using namespace bellows::e2e;

namespace {

using Table = std::vector<std::vector<int>>;

class PlanExperts : public testing::Test {
protected:
    Finished plan(const std::string& loads, const Flags& flags) const {
        Flags arguments = {"plan", "experts", "--loads",
                           workspace_.write("loads.json", loads).string()};
        arguments.insert(arguments.end(), flags.begin(), flags.end());
        return workspace_.bellows(arguments);
    }

    Workspace workspace_;
    const std::string loads_ = R"({"loads": [[90,132,40,61,104,165,39,4,73,56,183,86],
                                             [20,107,104,64,19,197,187,157,172,86,16,27]]})";
};

} // namespace

TEST_F(PlanExperts, PrintsTheTableAsJson) {
    const Finished by_nodes =
        plan(loads_, {"--groups", "4", "--nodes", "2", "--ranks", "8", "--slots", "16", "--json"});
    ASSERT_EQ(by_nodes.exit_code, 0) << by_nodes.errors;
    EXPECT_EQ(by_nodes.errors, "");
    const auto json = nlohmann::json::parse(by_nodes.out);
    EXPECT_EQ(json.at("physical_to_logical"),
              (Table{{5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1},
                     {7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1}}));
    EXPECT_NEAR(json.at("max_over_mean").at(0).get<double>(), 1.2081, 5e-5);
    EXPECT_NEAR(json.at("max_over_mean").at(1).get<double>(), 1.2422, 5e-5);

    const Finished all = plan(loads_, {"--ranks", "8", "--slots", "16", "--json"});
    ASSERT_EQ(all.exit_code, 0) << all.errors;
    EXPECT_EQ(nlohmann::json::parse(all.out).at("physical_to_logical"),
              (Table{{10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1},
                     {1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7}}));

    // Any number of replicas: two of 15 slots stay free.
    const Finished any = plan(loads_, {"--ranks", "5", "--slots", "13", "--json"});
    ASSERT_EQ(any.exit_code, 0) << any.errors;
    for (const auto& layer : nlohmann::json::parse(any.out).at("physical_to_logical")) {
        EXPECT_EQ(layer.size(), 15u);
        EXPECT_EQ(std::count(layer.begin(), layer.end(), -1), 2);
        for (int expert = 0; expert < 12; ++expert)
            EXPECT_GE(std::count(layer.begin(), layer.end(), expert), 1);
    }
}

TEST_F(PlanExperts, ShowsATable) {
    const Finished table = plan(loads_, {"--ranks", "8", "--slots", "16", "--distinct"});
    ASSERT_EQ(table.exit_code, 0) << table.errors;
    for (const char* part : {"12 experts in 16 of 16 slots", "layer   before    after", "2.083",
                             "10: 17.7 % x", "contiguous blocks"})
        EXPECT_NE(table.out.find(part), std::string::npos) << part << " in\n" << table.out;
}

TEST_F(PlanExperts, RefusesHostileFilesInOneLine) {
    for (const std::string& loads :
         {std::string(), std::string("\xff\xfe{"), std::string("{\"loads\": [[1, 2], [1]]}"),
          std::string("{\"loads\": [[1, -2]]}"), std::string("{\"loads\": [[1, NaN]]}"),
          std::string("{\"loads\": [[1, 1e400]]}"), std::string("{\"loads\": [[]]}"),
          std::string("{\"loads\": [[\"\\u001b[2J\"]]}"), std::string(1 << 20, '['),
          "{\"loads\": [[1, 2" + std::string(17 << 20, ' ') + "]]}"}) {
        const Finished refused = plan(loads, {"--ranks", "2", "--slots", "4", "--json"});
        const std::string shown = loads.substr(0, 40);
        EXPECT_EQ(refused.exit_code, 2) << shown;
        EXPECT_EQ(refused.out, "") << shown;
        EXPECT_EQ(std::count(refused.errors.begin(), refused.errors.end(), '\n'), 1)
            << refused.errors;
        EXPECT_NE(refused.errors.find("loads.json"), std::string::npos) << refused.errors;
        EXPECT_LT(refused.errors.size(), 600u);
    }
}
