/* 64 KiB boot ROM for the emulator (job.py writes the disk).
 * reset vector -> 32-bit protected mode -> read the disk by ATA PIO -> PVH
 * entry of an uncompressed Linux kernel.  No BIOS, no boot loader.
 * Sector 0 of the disk: u32 magic, entry, start_info address, 0, then
 * { u32 lba, sectors, destination } ... ended by sectors == 0.
 */
        .code16
        .org 0
start16:
        cli
        movw  $0xf000, %ax
        movw  %ax, %ds
        lgdtl gdtr - start16
        movl  %cr0, %eax
        orb   $1, %al
        movl  %eax, %cr0
        ljmpl $0x08, $(0xf0000 + start32 - start16)
        .code32
start32:
        movl  $0x10, %eax
        movl  %eax, %ds
        movl  %eax, %es
        movl  %eax, %ss
        movl  %eax, %fs
        movl  %eax, %gs
        movl  $0x9f00, %esp
        cld
        movb  $2, %al
        movw  $0x3f6, %dx
        outb  %al, %dx
        movl  $0x8000, %ebp      /* header sector */
        movl  %ebp, %edi
        xorl  %esi, %esi
        movl  $1, %ebx
        call  rd
        leal  16(%ebp), %ebp
1:      movl  0(%ebp), %esi
        movl  4(%ebp), %ebx
        movl  8(%ebp), %edi
        testl %ebx, %ebx
        jz    9f
        call  rd
        addl  $12, %ebp
        jmp   1b
9:      movl  0x8008, %ebx
        jmp   *0x8004
/* esi = lba, ebx = sectors, edi = dest */
rd:     testl %ebx, %ebx
        jz    8f
        movw  $0x1f6, %dx
        movl  %esi, %eax
        shrl  $24, %eax
        orb   $0xe0, %al
        outb  %al, %dx
        movl  $256, %ecx
        cmpl  %ecx, %ebx
        jae   2f
        movl  %ebx, %ecx
2:      movw  $0x1f2, %dx
        movb  %cl, %al
        outb  %al, %dx
        incl  %edx
        movl  %esi, %eax
        outb  %al, %dx
        incl  %edx
        shrl  $8, %eax
        outb  %al, %dx
        incl  %edx
        shrl  $8, %eax
        outb  %al, %dx
        movw  $0x1f7, %dx
        movb  $0x20, %al
        outb  %al, %dx
        addl  %ecx, %esi
        subl  %ecx, %ebx
3:      movw  $0x1f7, %dx
4:      inb   %dx, %al
        andb  $0x89, %al
        cmpb  $0x08, %al
        jne   4b
        movw  $0x1f0, %dx
        pushl %ecx
        movl  $256, %ecx
        rep insw
        popl  %ecx
        loop  3b
        jmp   rd
8:      ret
        .p2align 3
gdt:    .quad 0
        .quad 0x00cf9b000000ffff
        .quad 0x00cf93000000ffff
gdtr:   .word 23
        .long 0xf0000 + gdt - start16
        .org 0xfff0
        .code16
        ljmp  $0xf000, $0
        .org 0x10000
