// symbols.h: what the program's own file says: its thread-local variables, the source lines of its code.
#pragma once

#include <cxxabi.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "../base.h"
#include "../mapped_memory.h"

namespace simt {

inline std::string demangled(const char* name) {
    int status = 0;
    const std::unique_ptr<char, void (*)(void*)> readable(abi::__cxa_demangle(name, nullptr, nullptr, &status), free);
    return readable ? readable.get() : name;
}

// Where the program lies in memory.
struct Program {
    uintptr_t base = 0, end = 0;
    Program() {
        dl_iterate_phdr(
            [](dl_phdr_info* program, size_t, void* self) {  // the program itself comes first
                auto& p = *(Program*)self;
                p.base = program->dlpi_addr;
                for (const auto& part : std::span(program->dlpi_phdr, program->dlpi_phnum)) {
                    if (part.p_type == PT_LOAD) { p.end = std::max(p.end, p.base + part.p_vaddr + part.p_memsz); }
                }
                return 1;
            },
            this);
    }
    bool holds(const void* p) const { return (uintptr_t)p >= base && (uintptr_t)p < end; }
};

// A thread-local variable: where it begins in a thread's block of them.
struct ThreadLocal {
    size_t offset, bytes;
    std::string name;  // mangled
};
inline std::vector<ThreadLocal> thread_locals() {
    const MappedMemory file = MappedMemory::of_file("/proc/self/exe");
    const char* data = file.data();
    const auto& header = *(const Elf64_Ehdr*)data;
    const std::span sections((const Elf64_Shdr*)(data + header.e_shoff), header.e_shnum);
    std::vector<ThreadLocal> found;
    for (const auto& section : sections) {
        if (section.sh_type != SHT_SYMTAB) { continue; }
        const char* names = data + sections[section.sh_link].sh_offset;
        for (const auto& symbol : std::span((const Elf64_Sym*)(data + section.sh_offset), section.sh_size / sizeof(Elf64_Sym))) {
            if (ELF64_ST_TYPE(symbol.st_info) != STT_TLS || symbol.st_shndx == SHN_UNDEF) { continue; }
            found.push_back({symbol.st_value, symbol.st_size, names + symbol.st_name});
        }
    }
    check(!found.empty(), "simt: the program has no symbols: the checker needs them");
    return found;
}

// "file:line" of code at `offset` from the program's base; of inlined functions also where they were called, the outermost last.
inline std::string source_lines(uintptr_t offset) {
    const std::string command = format("addr2line -is -e /proc/%d/exe 0x%zx 2>/dev/null", (int)getpid(), (size_t)offset);
    const std::unique_ptr<FILE, int (*)(FILE*)> lines(popen(command.c_str(), "r"), pclose);
    std::string text;
    for (char line[1000]; lines && fgets(line, sizeof line, lines.get());) {
        const std::string_view place(line, strcspn(line, " \n"));
        if (place.starts_with("simt.h:")) { continue; }  // of an atomic, or a launch
        text += (text.empty() ? "" : " in ") + std::string(place);
    }
    return text.empty() ? "an unknown place" : text;
}

}  // namespace simt
