"""Holds what a newcomer's questions are about, by place in `wordings.py`, and other languages."""

from typing import Final

from scripts.pocket.wordings import lines

TOPICS: Final[dict[str, tuple[str, ...]]] = {
    "model": lines("""
        ChatGPT, maybe | GPT-4 | GPT-3 | GPT | Siri | Alexa | Llama | Llama 3 | Qwen | Qwen3
        Mistral | DeepSeek | Gemma | Copilot | Grok | Gemini Pro | Claude Opus | Claude Sonnet
        Chat GPT | chatgpt 4 | Phi | Kimi | Cortana | Bard | Gemini | the GPT model | Claude Code
        a GPT | ChatGPT 5 | Opus | Sonnet | GPT-4o | Perplexity | an OpenAI model | Claude 3
    """),
    "bad": lines("""
        sad | tired | down | awful | alone | empty | sick | angry | hurt | worried | nervous | ill
        unhappy | lost | terrible | miserable | exhausted | weak | hopeless | depressed | lonely
        frustrated | bored | afraid | stressed | upset | confused | scared | jealous | ashamed
    """),
    "good": lines("""
        happy | great | wonderful | good | proud | excited | fine | fantastic | cheerful | relaxed
        glad | lucky | amazing | in love | well | calm | content | grateful | strong | optimistic
    """),
    "maker": lines("""
        OpenAI | Anthropic | Google | Meta | Microsoft | Apple | Alibaba | Mistral | xAI | Amazon
        DeepSeek | Nvidia | Tesla | IBM
    """),
    "favorite": lines("""
        food | animal | city | book | movie | song | band | game | drink | number | season | sport
        flower | day | fruit | language | country | singer | actor | team | film | word | colour
    """),
    "topic": lines("""
        love | war | peace | politics | religion | football | cats | dogs | time | money | school
        work | cars | climate change | music | art | history | space | robots | the future | death
        history of Rome | AI | computers | coffee | tea | Mondays | summer | winter | the sea
        democracy | freedom | sleep | friendship | the internet | social media | health | sports
        marketing | cooking | travel | nature | ghosts | dragons | taxes | vegetables | magic
    """),
    "science": lines("""
        gravity | photosynthesis | electricity | relativity | quantum physics | black holes | DNA
        evolution | machine learning | a neural network | the internet | blockchain | magnetism
        recursion | string theory | the brain | a transformer | thermodynamics | a rainbow | atoms
        inflation | chemistry | plate tectonics | a computer | vaccines | an engine | the moon
    """),
    "person": lines("""
        Isaac Newton | Shakespeare | Mozart | Napoleon | Obama | Cleopatra | Picasso | Darwin
        Marie Curie | Leonardo da Vinci | Julius Caesar | Michael Jackson | Taylor Swift | Gandhi
        Elon Musk | Steve Jobs | Bill Gates | Lincoln | Beethoven | Messi | Ronaldo | Buddha
        Harry Potter | Batman | Superman | Plato | Sokrates | Stalin | Columbus | Galileo | Bach
    """),
    "famous": lines("""
        Nikola Tesla | Thomas Edison | George Washington | Ada Lovelace | Alan Turing | Van Gogh
        Nelson Mandela | Queen Victoria | Stephen Hawking | Charles Dickens | Frida Kahlo | Goethe
        Johann Sebastian Bach | Martin Luther King | Winston Churchill | Mark Twain | Aristotle
    """),
    "place": lines("""
        Germany | Spain | Italy | Poland | Canada | Brazil | China | India | Australia | Egypt
        Mexico | Russia | Sweden | Norway | Kenya | Peru | Chile | Turkey | Greece | Portugal
        Austria | the USA | America | England | Europe | Africa | Asia | Texas | California
        Paris | London | New York | Madrid | Rome | Tokyo | Moscow | Beijing | Vienna | Finland
    """),
    "invention": lines("""
        the telephone | the light bulb | the wheel | electricity | the computer | paper | America
        the internet | the car | the airplane | penicillin | printing | the radio | gunpowder
    """),
    "event": lines("""
        World War 1 | World War I | World War II | the French Revolution | the Cold War
        Christmas | the moon landing | the first war | the Roman Empire | the Middle Ages
        the last ice age | the American Civil War | the Renaissance | the big bang | the Titanic
        the war in Vietnam
    """),
    "many": lines("""
        stars | countries | continents | people | oceans | languages | states | islands | books
        bones | days in a year | hours in a day | legs on a spider | moons | rivers | galaxies
    """),
    "why": lines("sky | sea | grass | sun | moon | blood | snow | night | ocean | desert | fire"),
    "far": lines("moon | sun | next star | sea | North Pole | galaxy | earth | planet Mars"),
    "tall": lines("""
        the Eiffel Tower | Mount Everest | the Empire State Building | Big Ben | the moon | Rome
        the earth | the universe | a giraffe | the White House | the Colosseum | the sun
    """),
    "large": lines("country | river | mountain | ocean | city | planet | animal | lake | island"),
    "work": lines("""
        Macbeth | Romeo and Juliet | the Odyssey | the Bible | Faust | Star Wars | Don Quixote
        the Mona Lisa | War and Peace | Harry Potter | The Hobbit | Moby Dick | Titanic | Othello
        The Matrix | Frankenstein | Dracula | the Iliad | Game of Thrones | Hey Jude | Emma
    """),
    "subject": lines("""
        math | physics | chemistry | programming | history | English | the piano | biology
        cooking | Python | geometry | algebra | Latin | economics | statistics | drawing | guitar
        calculus
    """),
    "recommend": lines("""
        book | movie | restaurant | hotel | phone | laptop | car | game | song | wine | school
        gift | camera | bike | doctor | series | podcast | computer | present | diet | dog breed
        beach
    """),
    "year": lines("1066 | 1492 | 1789 | 1914 | 1969 | 1989 | 2001 | 2020 | 2024"),
    "text": lines("""
        poem | story | letter | song | essay | report | speech | novel | joke book | blog post
        email | short story | love letter | sonnet | tweet | review | script | summary
        cover letter | ballad | poem with four lines | paragraph | text | book | play | haiku
        rap | sentence | limerick
    """),
    "kind": lines(
        "short | scary | funny | sad | nice | good night | long | love | true | children's"
    ),
    "lang": lines("""
        Python | C++ | Java | Rust | JavaScript | Go | C | Ruby | TypeScript | Swift | Haskell
        SQL | PHP | Bash | HTML | python | js | Kotlin
    """),
    "code": lines("""
        sorts numbers | adds two numbers | prints hello world | reads a file | finds primes
        counts words | reverses a list | computes a factorial | parses JSON | draws a circle
        sends a request | checks for a palindrome | computes Fibonacci numbers
        removes duplicates | opens a website | sorts a list | merges two lists | finds the maximum
        splits a string | counts letters
    """),
    "code2": lines("""
        read a file | sort a list | write a loop | make a class | parse JSON | use regex
        print text | open a socket | declare a variable | install a package
        connect to a database | join strings
    """),
    "algo": lines(
        "quicksort | binary search | a linked list | FizzBuzz | a hash table | Dijkstra | a stack"
    ),
    "game": lines("""
        hangman | tic tac toe | a game | cards | poker | checkers | twenty questions
        hide and seek | a word game | a guessing game | rock paper scissors | Go | trivia
        Monopoly | dice
    """),
    "job": lines(
        "teacher | lawyer | pirate | king | painter | doctor | poet | president | singer | cook"
    ),
    "language": lines("""
        German | Italian | Chinese | Japanese | Russian | Dutch | Polish | Arabic | Turkish
        Latin | Portuguese | Korean | Hindi | Swedish | Greek | Hebrew | Danish | other languages
        Finnish | Spanish, maybe | French, too | Vietnamese | Klingon | Esperanto | Ukrainian
        Czech | Thai
    """),
}

LANGUAGES: Final = tuple(
    lines(text)
    for text in (
        """
        Hallo | Guten Tag | Wer bist du? | Was kannst du? | Wie geht es Ihnen? | Hilfe
        Danke schön | Wie heißt du? | Guten Morgen | Kannst du Deutsch? | Sprichst du Deutsch?
        Ich heiße Anna | Kannst du mir helfen? | Was ist die Hauptstadt von Italien?
        Erzähl mir einen Witz | Ja | Nein | Schreibe ein Gedicht | Meine Katze heißt Minka
        Wie spät ist es? | Auf Wiedersehen | Tschüss | Hallo, wer bist du? | Was ist das?
        Ich verstehe das nicht | Wo wohnst du? | Guten Abend | Hallo, kannst du mir bitte helfen?
        Na, wie geht's? | Wie ist das Wetter heute? | Vielen Dank | Ich bin müde | Das ist gut
        Ich habe eine Frage | Was machst du? | Gute Nacht | Moin
        """,
        """
        Bonjour | Salut | Qui êtes-vous ? | Comment ça va ? | Merci beaucoup | Que peux-tu faire ?
        Comment tu t'appelles ? | Parlez-vous français ? | Je m'appelle Marie | Bonsoir
        Au revoir | Quelle heure est-il ? | Raconte-moi une blague | Aide-moi | Où habites-tu ?
        Oui | Non | Bonjour, comment allez-vous ? | Quel temps fait-il ? | Je ne comprends pas
        C'est bien | Quelle est la capitale de l'Italie ? | Mon chat s'appelle Minou
        Écris un poème | Je suis là | Est-ce que tu peux m'aider ? | Bonne nuit | Tu es qui ?
        Pouvez-vous parler ? | Ça marche ? | Je voudrais une aide | Qu'est-ce que c'est ?
        J'ai une question | Bonjour à tous
        """,
        """
        Hola | Buenos días | ¿Quién eres? | ¿Cómo estás? | Gracias | Muchas gracias
        ¿Hablas español? | ¿Cómo te llamas? | Me llamo Ana | ¿Qué hora es? | Cuéntame un chiste
        Adiós | Buenas noches | ¿Me puedes ayudar? | ¿Cuál es la capital de Italia?
        Mi gato se llama Luna | Ayuda | Sí | Hola, ¿cómo estás? | No entiendo | ¿Dónde vives?
        Escribe un poema | Hasta luego | que tal | ¿Qué es esto? | Buenas tardes
        ¿Qué sabes hacer? | ¿Qué tiempo hace? | Estoy bien | quien eres tu | ¿Puedes escribir?
        Tengo una pregunta | ¿Qué eres? | hola que haces | ¿Para qué sirves?
        """,
        """
        Ciao, come stai? | Buongiorno | Chi sei? | Come ti chiami? | Grazie mille
        Parli italiano? | Che cosa sai fare? | Mi chiamo Luca | Aiuto | Che ore sono?
        Arrivederci | Buona notte | Puoi aiutarmi? | Il mio gatto si chiama Leo | Non capisco
        Dove vivi? | Come va? | Buonasera | Qual è la capitale della Francia?
        Raccontami una storia | Va bene | Che cosa è questo?
        """,
        """
        Olá | Bom dia | Quem é você? | Como vai você? | Obrigado | Você fala português?
        Tudo bem? | Qual é o seu nome? | Meu nome é Ana | Me ajude | O que você pode fazer?
        Boa noite | Tchau | Que horas são? | Meu gato se chama Mel | Não entendo | Onde você mora?
        Boa tarde | oi
        """,
        """
        Hallo, hoe gaat het? | Wie ben jij? | Goedemorgen | Dank je wel | Wat kun je doen?
        Tot ziens | Spreek je Nederlands? | Mijn kat heet Pim | Hoe heet je? | Kun je mij helpen?
        Hoe laat is het? | Hej, hvordan går det? | Hur mår du? | Hvem er du? | Vad heter du?
        Tack så mycket | Hyvää päivää | Mitä kuuluu? | God morgen | Kan du hjälpa mig?
        Jag heter Erik | Snakker du norsk? | Hej hej
        """,
        """
        Cześć | Jak się masz? | Kim jesteś? | Dzień dobry | Dziękuję | Jak masz na imię?
        Co potrafisz? | Dobrý den | Kdo jsi? | Jak se máš? | Děkuji | Merhaba | Nasılsın?
        Sen kimsin? | Teşekkürler | Adın ne? | Bana yardım et | Szia | Hogy vagy? | Ki vagy te?
        Bună ziua | Ce mai faci? | Xin chào | Bạn là ai? | Selamat pagi | Apa kabar? | Siapa kamu?
        Habari gani? | Kumusta ka? | Zdravo
        """,
        """
        Привет | Как дела? | Кто ты? | Что ты умеешь? | Спасибо | Как тебя зовут? | Доброе утро
        Помоги мне | Меня зовут Иван | Ты говоришь по-русски? | Расскажи шутку | Пока
        Здравствуйте | Привіт | Як справи? | Хто ти? | Дякую | Здравей | Кој си ти? | Моя кошка
        Сколько времени? | Γεια σου | Τι κάνεις; | Ποιος είσαι; | Ευχαριστώ | Καλημέρα
        Πώς σε λένε;
        """,
        """
        你好 | 你好吗？ | 你是谁 | 你叫什么名字？ | 谢谢 | 早上好 | 你会做什么？ | 我叫小明 | 再见
        请帮我 | 现在几点？ | 讲个笑话 | 你会说中文吗？ | 您好，请问你能做什么？
        今天天气怎么样？ | 我的猫叫咪咪 | 中国的首都是哪里？ | 晚安 | こんにちは | お元気ですか？
        あなたは誰ですか？ | ありがとう | おはよう | 名前は何ですか？ | 助けてください
        何ができますか？ | 日本語を話せますか？ | さようなら | 私の名前は太郎です | 안녕하세요
        당신은 누구입니까? | 감사합니다 | 이름이 뭐예요? | 도와주세요 | 한국어 할 수 있어요?
        잘 가 | 뭐 할 수 있어?
        """,
        """
        مرحبا | كيف حالك؟ | من أنت؟ | شكرا | ما اسمك؟ | ساعدني | صباح الخير | هل تتكلم العربية؟
        שלום | מה שלומך? | מי אתה? | תודה | नमस्ते | आप कैसे हैं? | आप कौन हैं? | धन्यवाद
        आपका नाम क्या है? | สวัสดี | คุณคือใคร | ขอบคุณ | سلام | حال شما چطور است؟ | আপনি কে?
        வணக்கம்
        """,
    )
)
