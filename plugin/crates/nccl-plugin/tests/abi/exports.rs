//! What the library exports and how it is linked.

use std::fs;

use crate::harness::{VERSIONS, library_path};

/// A section of a little-endian 64-bit ELF file: type, contents, index of the linked section.
struct Section<'a> {
    kind: u32,
    bytes: &'a [u8],
    link: usize,
}

fn number(bytes: &[u8], at: usize, size: usize) -> usize {
    bytes[at..at + size].iter().rev().fold(0, |value, byte| value << 8 | usize::from(*byte))
}

fn sections(elf: &[u8]) -> Vec<Section<'_>> {
    assert_eq!(&elf[..6], b"\x7fELF\x02\x01", "a 64-bit little-endian ELF file");
    let (start, size, count) = (number(elf, 0x28, 8), number(elf, 0x3a, 2), number(elf, 0x3c, 2));
    (0..count)
        .map(|index| {
            let header = &elf[start + index * size..][..size];
            let (offset, length) = (number(header, 0x18, 8), number(header, 0x20, 8));
            let kind = number(header, 4, 4) as u32;
            const NOBITS: u32 = 8;
            let bytes = if kind == NOBITS { &[] } else { &elf[offset..offset + length] };
            Section { kind, bytes, link: number(header, 0x28, 4) }
        })
        .collect()
}

#[test]
fn only_the_tables_are_exported() {
    const DYNSYM: u32 = 11;
    let elf = fs::read(library_path()).expect("read the library");
    let sections = sections(&elf);
    let symbols = sections.iter().find(|section| section.kind == DYNSYM).expect("symbols");
    let names = sections[symbols.link].bytes;
    let mut exported: Vec<String> = symbols
        .bytes
        .chunks(24)
        // A section index of zero means that the symbol is imported.
        .filter(|symbol| number(symbol, 6, 2) != 0)
        .map(|symbol| {
            let name = &names[number(symbol, 0, 4)..];
            let end = name.iter().position(|byte| *byte == 0).expect("end of a name");
            String::from_utf8_lossy(&name[..end]).into_owned()
        })
        .collect();
    exported.sort();
    let mut expected: Vec<String> = VERSIONS
        .iter()
        .flat_map(|version| {
            [format!("ncclNetPlugin_v{version}"), format!("ncclCollNetPlugin_v{version}")]
        })
        .chain((2..=6).map(|version| format!("ncclTunerPlugin_v{version}")))
        .collect();
    expected.sort();
    assert_eq!(exported, expected);
}

#[test]
fn library_stays_mapped() {
    const DYNAMIC: u32 = 6;
    const FLAGS_1: usize = 0x6fff_fffb;
    const NODELETE: usize = 8;
    let elf = fs::read(library_path()).expect("read the library");
    let sections = sections(&elf);
    let dynamic = sections.iter().find(|section| section.kind == DYNAMIC).expect("dynamic");
    let flags = dynamic
        .bytes
        .chunks(16)
        .find(|entry| number(entry, 0, 8) == FLAGS_1)
        .map(|entry| number(entry, 8, 8))
        .expect("flags");
    assert_ne!(flags & NODELETE, 0);
}
