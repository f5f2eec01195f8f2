// SPDX-License-Identifier: MIT
#include <bellows/text/words.hpp>

#include <gtest/gtest.h>

using namespace bellows;

TEST(Words, ShareOfThoseThatStandInTheCorpus) {
    const WordSet known("The licence, and THE (free) software-package; naïve");
    EXPECT_EQ(known.size(), 7u);
    EXPECT_TRUE(known.contains("Software"));
    EXPECT_FALSE(known.contains("softwar"));
    const WordCheck check = check_words("the free sofware, PACKAGE naïve 123 lic", known);
    EXPECT_EQ(check.words, 5u) << "the last one may have been cut";
    EXPECT_EQ(check.known, 4u);
    EXPECT_DOUBLE_EQ(check.share(), 0.8);
    EXPECT_EQ(check_words("", known).share(), 0);
    EXPECT_EQ(check_words("12 --", known).words, 0u);
}
