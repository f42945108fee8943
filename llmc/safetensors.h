// safetensors.h: Hugging Face's tensor container, read and written. A file is
//
//   u64 N | N bytes of JSON: {"name": {"dtype", "shape", "data_offsets": [begin, end)}, ...} | the bytes of the tensors
//
// little-endian, row-major, no holes and no overlap. Downloads are hostile input: a cut file, a Git-LFS pointer, an HTML
// error page. The header is believed only after every number in it was checked against the size of the file.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>

#include <bit>
#include <map>

#include "json_file.h"

static_assert(std::endian::native == std::endian::little, "files are little-endian and are read without conversion");

// In the library's order, which is also (backwards) the order of tensors in a file.
struct SafetensorsType {
    const char* name;
    int bits;
};
constexpr SafetensorsType SAFETENSORS_TYPES[] = {{"BOOL", 8}, {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
                                                 {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"I16", 16},
                                                 {"U16", 16}, {"F16", 16},    {"BF16", 16},   {"I32", 32},    {"U32", 32},
                                                 {"F32", 32}, {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}};
// Position in the table, or -1.
inline int safetensors_type(std::string_view dtype) {
    for (int i = 0; i < (int)std::size(SAFETENSORS_TYPES); i++) {
        if (dtype == SAFETENSORS_TYPES[i].name) { return i; }
    }
    return -1;
}

struct SafetensorsEntry {
    std::string name, dtype;
    std::vector<i64> shape;
    i64 begin = 0, end = 0;  // bytes, counted from the end of the header

    // Bytes that dtype and shape ask for, -1 where no file could hold them.
    i64 bytes() const {
        const int type = safetensors_type(dtype);
        i64 bits = type < 0 ? -1 : SAFETENSORS_TYPES[type].bits;
        for (const i64 n : shape) {
            if (n < 0 || bits < 0 || __builtin_mul_overflow(bits, n, &bits)) { return -1; }
        }
        return bits % 8 == 0 ? bits / 8 : -1;
    }
    std::string shape_text() const {
        std::string text;
        for (const i64 n : shape) { text += (text.empty() ? "" : ", ") + std::to_string(n); }
        return "[" + text + "]";
    }
};

// 1 sign, 5 exponent, 10 mantissa bits. Moved up to a float's places the value is 2^112 too small, exactly.
inline float half_to_float(uint16_t half) {
    const uint32_t magnitude = (uint32_t)(half & 0x7FFF) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    const bool special = (half & 0x7C00) == 0x7C00;  // infinity, NaN
    const float value = std::bit_cast<float>(magnitude) * 0x1p112f;
    return std::bit_cast<float>((special ? magnitude | 0x7F800000 : std::bit_cast<uint32_t>(value)) | sign);
}

class SafetensorsFile {
public:
    explicit SafetensorsFile(const std::string& path) : path_(path) {
        const File file(path, "rb");
        bytes_ = file.size();
        if (bytes_ > 0) {
            void* map = mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, fileno(file.handle()), 0);
            check(map != MAP_FAILED, "cannot map '%s': %s", path.c_str(), strerror(errno));
            map_ = (const char*)map;
        }
        try {
            parse_header();
        } catch (...) {
            unmap();
            throw;
        }
    }
    SafetensorsFile(const SafetensorsFile&) = delete;
    SafetensorsFile& operator=(const SafetensorsFile&) = delete;
    ~SafetensorsFile() { unmap(); }

    const std::string& path() const { return path_; }
    const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }
    const SafetensorsEntry* find(const std::string& name) const {
        const auto it = entries_.find(name);
        return it == entries_.end() ? nullptr : &it->second;
    }

    // out[0, count) = elements [first, first + count) of the tensor, as floats.
    void read(const SafetensorsEntry& e, i64 first, i64 count, float* out) const {
        const char* data = data_ + e.begin;
        const auto convert = [&](auto stored, auto to_float) {  // the data need not be aligned
            const i64 size = sizeof(stored);
            check(first >= 0 && count >= 0 && first <= (e.end - e.begin) / size - count, "'%s': '%s' has no elements [%lld, %lld)",
                  path_.c_str(), e.name.c_str(), (long long)first, (long long)(first + count));
            for (i64 i = 0; i < count; i++) {
                memcpy(&stored, data + (first + i) * size, size);
                out[i] = to_float(stored);
            }
        };
        if (e.dtype == "F32") {
            convert(float(), [](float x) { return x; });
        } else if (e.dtype == "BF16") {
            convert(uint16_t(), [](uint16_t x) { return std::bit_cast<float>((uint32_t)x << 16); });
        } else if (e.dtype == "F16") {
            convert(uint16_t(), half_to_float);
        } else if (e.dtype == "F64") {
            convert(double(), [](double x) { return (float)x; });
        } else {
            die("'%s': '%s' has dtype %s; weights are read from F32, F16, BF16 or F64", path_.c_str(), e.name.c_str(), e.dtype.c_str());
        }
    }

private:
    [[noreturn]] void refuse(const std::string& why) const {
        die("'%s' is not a safetensors file / incomplete download: %s\nHINT: download it again; with git, run 'git lfs pull'",
            path_.c_str(), why.c_str());
    }

    void parse_header() {
        constexpr std::string_view LFS = "version https://git-lfs";
        const std::string_view start(map_, std::min<i64>(bytes_, LFS.size()));
        if (start == LFS) { refuse("it is a Git-LFS pointer"); }
        if (start.starts_with("<")) { refuse("it is an HTML page"); }
        if (bytes_ < 8) { refuse(format("it has %lld bytes", (long long)bytes_)); }
        uint64_t length;
        memcpy(&length, map_, 8);
        if (length > (uint64_t)bytes_ - 8) {
            refuse(format("its header should have %llu bytes, the file has %lld", (unsigned long long)length, (long long)bytes_));
        }
        if (length > 100'000'000) { refuse(format("its header has %llu bytes", (unsigned long long)length)); }
        if (length == 0 || map_[8] != '{') { refuse("its header is not a JSON object"); }
        data_ = map_ + 8 + length;

        json header;
        try {
            header = parse_json({map_ + 8, length}, path_);
        } catch (const Error& e) { refuse(e.what()); }
        std::vector<const SafetensorsEntry*> by_offset;
        for (const auto& [name, value] : header.items()) {
            if (name == "__metadata__") { continue; }
            by_offset.push_back(&(entries_[name] = parse_entry(name, value)));
        }
        std::sort(by_offset.begin(), by_offset.end(),
                  [](auto* a, auto* b) { return std::pair(a->begin, a->end) < std::pair(b->begin, b->end); });
        i64 end = 0;
        for (const SafetensorsEntry* e : by_offset) {
            if (e->begin != end) {
                refuse(format("'%s' starts at byte %lld of the data, wanted %lld", e->name.c_str(), (long long)e->begin, (long long)end));
            }
            end = e->end;
        }
        const i64 have = bytes_ - 8 - (i64)length;
        if (end != have) { refuse(format("its tensors need %lld bytes, the file has %lld", (long long)end, (long long)have)); }
    }

    SafetensorsEntry parse_entry(const std::string& name, const json& value) const {
        SafetensorsEntry e;
        e.name = name;
        try {
            e.dtype = json_get<std::string>(value, "dtype", path_);
            for (const json& n : value.at("shape")) { e.shape.push_back(json_get<i64>({{"shape", n}}, "shape", path_)); }
            const json& offsets = value.at("data_offsets");
            if (offsets.size() != 2) { refuse(format("'%s' has %zu offsets", name.c_str(), offsets.size())); }
            e.begin = json_get<i64>({{"data_offsets", offsets[0]}}, "data_offsets", path_);
            e.end = json_get<i64>({{"data_offsets", offsets[1]}}, "data_offsets", path_);
        } catch (const json::exception& error) { refuse(format("'%.100s': %.200s", name.c_str(), error.what())); }
        if (safetensors_type(e.dtype) < 0) { refuse(format("'%s' has the unknown dtype '%.20s'", name.c_str(), e.dtype.c_str())); }
        if (e.begin < 0 || e.end < e.begin || e.end - e.begin != e.bytes()) {
            refuse(format("'%s' is %s %s but has bytes [%lld, %lld)", name.c_str(), e.dtype.c_str(), e.shape_text().c_str(),
                          (long long)e.begin, (long long)e.end));
        }
        return e;
    }
    void unmap() {
        if (map_) { munmap((void*)map_, bytes_); }
    }

    std::string path_;
    i64 bytes_ = 0;
    const char *map_ = nullptr, *data_ = nullptr;
    std::map<std::string, SafetensorsEntry> entries_;
};

// Writes tensors one after the other, never holding them all: declare them, then write the bytes of each in order().
// The file appears under its name only when it is complete.
class SafetensorsWriter {
public:
    SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries)
        : path_(path), partial_(path + ".partial"), order_(std::move(entries)), file_(partial_, "wb") {
        // As the library does: wide types first, so that every tensor is aligned; then by name.
        std::sort(order_.begin(), order_.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
            return std::pair(-safetensors_type(a.dtype), std::string_view(a.name)) <
                   std::pair(-safetensors_type(b.dtype), std::string_view(b.name));
        });
        std::string header = R"({"__metadata__":{"format":"pt"})";
        for (SafetensorsEntry& e : order_) {
            check(e.bytes() >= 0, "'%s': cannot write '%s' as %s %s", path.c_str(), e.name.c_str(), e.dtype.c_str(),
                  e.shape_text().c_str());
            e.begin = total_;
            e.end = total_ += e.bytes();
            header += "," + json(e.name).dump() + R"(:{"dtype":")" + e.dtype + R"(","shape":)" + json(e.shape).dump() +
                      format(R"(,"data_offsets":[%lld,%lld]})", (long long)e.begin, (long long)e.end);
        }
        header += "}";
        header.resize(round_up(header.size(), 8), ' ');
        const uint64_t length = header.size();
        file_.write(&length, 8);
        file_.write(header.data(), header.size());
    }
    ~SafetensorsWriter() { unlink(partial_.c_str()); }  // nothing there once it is finished

    const std::vector<SafetensorsEntry>& order() const { return order_; }
    void write(const void* data, i64 bytes) {
        written_ += bytes;
        file_.write(data, bytes);
    }
    void finish() {
        check(written_ == total_, "'%s': wrote %lld bytes of tensors, declared %lld", path_.c_str(), (long long)written_,
              (long long)total_);
        file_.sync_and_close();
        check(rename(partial_.c_str(), path_.c_str()) == 0, "cannot rename '%s': %s", partial_.c_str(), strerror(errno));
    }

private:
    std::string path_, partial_;
    std::vector<SafetensorsEntry> order_;
    File file_;
    i64 total_ = 0, written_ = 0;
};
