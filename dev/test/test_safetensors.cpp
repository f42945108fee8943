// test_safetensors.cpp: files good and bad.
#include <gtest/gtest.h>

#include "llmc/safetensors.h"
#include "tiny_models.h"

namespace {

std::string header_and(const std::string& header, size_t data_bytes) {
    const uint64_t length = header.size();
    return std::string((const char*)&length, 8) + header + std::string(data_bytes, '\0');
}

TEST(Safetensors, HostileFilesAreRefusedByName) {
    const TempDir dir;
    const std::string path = dir.path + "/model.safetensors";
    const auto entry = [](const std::string& name, const std::string& dtype, const std::string& shape, const std::string& offsets) {
        return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
    };
    const std::string good = header_and("{" + entry("a", "F32", "[2,3]", "[0,24]") + "}", 24);
    write_file(path, good);
    EXPECT_EQ(SafetensorsFile(path).entries().size(), 1u);
    write_file(path, header_and("{}", 0));
    EXPECT_EQ(SafetensorsFile(path).entries().size(), 0u);
    write_file(path, header_and("{" + entry("empty", "F32", "[0,3]", "[0,0]") + "," + entry("scalar", "F64", "[]", "[0,8]") + "}   ", 8));
    EXPECT_EQ(SafetensorsFile(path).entries().size(), 2u);

    const std::string huge(8, '\x7F'), half_of_64_bits("\0\0\0\0\0\0\0\x80", 8);
    const std::vector<std::pair<std::string, std::string>> bad = {
        {"", "0 bytes"},
        {good.substr(0, 4), "4 bytes"},
        {good.substr(0, 8), "header"},
        {good.substr(0, 40), "header"},
        {good.substr(0, good.size() - 1), "24 bytes"},
        {good + "x", "25"},
        {half_of_64_bits + good.substr(8), "header"},
        {huge + good.substr(8), "header"},
        {header_and("", 0), "JSON object"},
        {"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 437\n", "Git-LFS"},
        {"<!DOCTYPE html><html>404</html>", "HTML"},
        {header_and("[1]", 0), "JSON object"},
        {header_and("{\"a\":", 0), "JSON"},
        {header_and("{\"a\":1}", 0), "dtype"},
        {header_and("{" + std::string(3, '\xFF') + "}", 0), "JSON"},
        {header_and("{\"a\":" + std::string(100000, '[') + std::string(100000, ']') + "}", 0), "nested"},
        {header_and("{" + entry("a", "F32", "[6]", "[0,24]") + "," + entry("a", "F32", "[6]", "[0,24]") + "}", 24), "twice"},
        {header_and("{" + entry("a", "F32", "[6]", "[0,24]") + "," + entry("b", "F32", "[6]", "[0,24]") + "}", 24), "'b' starts"},
        {header_and("{" + entry("a", "F32", "[6]", "[8,32]") + "}", 32), "'a' starts"},
        {header_and("{" + entry("a", "F32", "[6]", "[0,20]") + "}", 24), "[0, 20)"},
        {header_and("{" + entry("a", "F32", "[6]", "[24,0]") + "}", 24), "[24, 0)"},
        {header_and("{" + entry("a", "F32", "[-2,-3]", "[0,24]") + "}", 24), "-2"},
        {header_and("{" + entry("a", "F32", "[4294967296,4294967296]", "[0,0]") + "}", 0), "4294967296"},
        {header_and("{" + entry("a", "F32", "[18446744073709551615]", "[0,0]") + "}", 0), "integer"},
        {header_and("{" + entry("a", "F32", "[2.5]", "[0,8]") + "}", 8), "2.5"},
        {header_and("{" + entry("a", "F32", "[2]", "[0]") + "}", 8), "offsets"},
        {header_and("{" + entry("a", "F31", "[2]", "[0,8]") + "}", 8), "F31"},
        {header_and("{" + entry("a", "F4", "[3]", "[0,1]") + "}", 1), "F4"},
    };
    for (const auto& [bytes, word] : bad) {
        write_file(path, bytes);
        const std::string message = message_of([&] { SafetensorsFile file(path); });
        expect_mentions(message, {"model.safetensors", word});
    }
    write_file(path, good.substr(0, 4));
    expect_mentions(message_of([&] { SafetensorsFile file(path); }), {"not a safetensors file / incomplete download", "HINT"});
}

TEST(Safetensors, DtypesConvertExactly) {
    EXPECT_EQ(half_to_float(0x3C00), 1.0f);
    EXPECT_EQ(half_to_float(0xC000), -2.0f);
    EXPECT_EQ(half_to_float(0x7BFF), 65504.0f);
    EXPECT_EQ(half_to_float(0x0001), 0x1p-24f);
    EXPECT_EQ(half_to_float(0x83FF), -0x3FFp-24f);
    EXPECT_EQ(half_to_float(0x7C00), INFINITY);
    EXPECT_TRUE(std::isnan(half_to_float(0x7E01)));
    EXPECT_TRUE(std::signbit(half_to_float(0x8000)));
    for (int exponent = 1; exponent < 31; exponent++) {
        for (int mantissa = 0; mantissa < 1024; mantissa++) {
            EXPECT_EQ(half_to_float((uint16_t)(exponent << 10 | mantissa)), std::ldexp(1 + mantissa / 1024.0f, exponent - 15));
        }
    }
}

TEST(Safetensors, WrittenAsTheLibraryDoes) {
    const TempDir dir;
    const std::string path = dir.path + "/out.safetensors";
    SafetensorsWriter writer(path, {{"b", "BF16", {3}}, {"z", "F32", {1, 2}}, {"\"q\"", "F32", {}}, {"d", "F64", {1}}, {"h", "F16", {2}}});
    const double d = 1.5;
    const float q = 2.5f, z[] = {3.5f, -4.5f};
    const uint16_t b[] = {0x3F80, 0xBF80, 0x7F80}, h[] = {0x3C00, 0x0001};
    std::string order;
    for (const SafetensorsEntry& e : writer.order()) { order += e.name + " "; }
    EXPECT_EQ(order, "d \"q\" z b h ");
    writer.write(&d, 8), writer.write(&q, 4), writer.write(z, 8), writer.write(b, 6);
    EXPECT_FALSE(path_exists(path));
    expect_mentions(message_of([&] { writer.finish(); }), {"26 bytes", "declared 30"});
    writer.write(h, 4);
    writer.finish();
    const std::string bytes = read_text_file(path);
    EXPECT_EQ(bytes.substr(8, 89), R"({"__metadata__":{"format":"pt"},"d":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},"\"q)");
    EXPECT_EQ((bytes.size() - 30) % 8, 0u);

    const SafetensorsFile file(path);
    const auto read = [&](const char* name, i64 first, i64 count) {
        std::vector<float> out(count);
        file.read(*file.find(name), first, count, out.data());
        return out;
    };
    EXPECT_EQ(read("d", 0, 1), std::vector<float>{1.5f});
    EXPECT_EQ(read("\"q\"", 0, 1), std::vector<float>{2.5f});
    EXPECT_EQ(read("z", 1, 1), std::vector<float>{-4.5f});
    EXPECT_EQ(read("b", 0, 3), (std::vector<float>{1, -1, INFINITY}));
    EXPECT_EQ(read("h", 0, 2), (std::vector<float>{1, 0x1p-24f}));
    EXPECT_NE(message_of([&] { read("h", 1, 2); }), "");
    EXPECT_EQ(file.find("nothing"), nullptr);
    { SafetensorsWriter abandoned(dir.path + "/abandoned", {{"a", "F32", {1}}}); }
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path), {}), 1);
}

}  // namespace
